"""Series with a known law."""

from __future__ import annotations

import numpy as np


def ar1(rho, count, seed):
    """A Gaussian autoregression of variance one, shape (count,)."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(count)
    out = np.empty(count)
    out[0] = noise[0]
    for i in range(1, count):
        out[i] = rho * out[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return out
