"""Two kinds of noise written after the method was frozen, on which nothing was tuned."""

from __future__ import annotations

import numpy as np
from noise import SIGMA, Noise, autoregression


def housekeeping(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Every 97th sample is 8 % slower, and a fan makes a wave of 0.2 % every 350 samples."""
    when = np.arange(length) + rng.integers(0, 97 * 350, (rows, 1))
    skewed = 0.5 * SIGMA * (rng.gamma(4.0, 0.5, (rows, length)) - 2.0)
    return skewed + 0.08 * (when % 97 == 0) + 0.002 * np.sin(2 * np.pi * when / 350)


def changing_volatility(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Calm and noisy stretches: the spread itself wanders, and a third clock state flickers."""
    spread = np.exp(0.5 / SIGMA * autoregression(0.97)(rng, rows, length))
    flicker = 0.004 * (autoregression(0.8)(rng, rows, length) > 1.2 * SIGMA)
    return 0.5 * SIGMA * spread * rng.standard_normal((rows, length)) + flicker


UNSEEN: dict[str, Noise] = {
    "housekeeping": housekeeping,
    "changing volatility": changing_volatility,
}
