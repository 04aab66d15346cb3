"""Measures the overhead of the timing itself."""

from __future__ import annotations

import numpy as np

from steadytorch.errors import UsageError
from steadytorch.measure.sampler import Sampler


def probe_overhead(sampler: Sampler, count: int) -> float:
    """Return an upper bound of the time that the sampler adds to an iteration, in ns.

    The bound is the median period of an empty step. While the device is busy, part of the sampler's
    overhead is hidden.

    Args:
        sampler: the sampler to test.
        count: number of iterations; a few hundred take well under 10 ms.

    Raises:
        UsageError: `count` is below one.
    """
    if count < 1:
        raise UsageError(f"count is {count}: measuring the overhead needs at least 1 iteration")
    periods, _ = sampler.periods(_nothing, count)
    return float(np.median(periods))


def _nothing() -> None:
    """The empty step."""
