"""Kinds of noise found in timings, as logarithms of the factor on an undisturbed duration.

Each kind is a function of (generator, replications, length) that gives an array of that shape: one
time line per row. On such a line blocks of two arms are laid in turn, so that both meet the same
drift, clock and neighbours. What an arm does to the time is added to its own samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.signal import lfilter

Noise = Callable[[np.random.Generator, int, int], np.ndarray]

SIGMA = 0.01
"""Standard deviation of the plain kinds: 1 % of the duration."""
BURN_IN = 400
"""Samples before the line begins, so that bursts and states are under way when it does."""

KEPT = 7
DISCARDED = 2
BLOCK = KEPT + DISCARDED


def iid(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    return SIGMA * rng.standard_normal((rows, length))


def autoregression(rho: float) -> Noise:
    """Gaussian, correlation rho from sample to sample, stationary from the first one on."""

    def noise(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        shocks = rng.standard_normal((rows, length))
        shocks[:, 1:] *= np.sqrt(1 - rho * rho)
        return SIGMA * lfilter([1.0], [1.0, -rho], shocks, axis=1)

    return noise


def drift(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Three percent slower from beginning to end, in a straight line."""
    return iid(rng, rows, length) + np.linspace(0.0, 0.03, length)


def ramp(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Ten percent slower at first; the excess falls to 1/e every twentieth part of the line."""
    return iid(rng, rows, length) + 0.1 * np.exp(-np.linspace(0.0, 20.0, length))


def two_states(
    rng: np.random.Generator, rows: int, length: int, gap: float = 0.03, dwell: int = 200
) -> np.ndarray:
    """A clock that changes between two rates, staying 200 samples at each on average."""
    switched = rng.random((rows, length)) < 1.0 / dwell
    state = (np.cumsum(switched, axis=1) + rng.integers(0, 2, (rows, 1))) % 2
    return 0.5 * iid(rng, rows, length) + gap * state


def heavy_tail(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Student's t with 2.5 degrees of freedom, longer to the right."""
    values = 0.006 * rng.standard_t(2.5, (rows, length))
    return np.clip(np.where(values > 0, 1.5 * values, values), -0.2, 2.0)


def bursts(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """A neighbour that takes 10 to 25 % for 25 samples on average, every 800 or so."""
    total = length + BURN_IN
    when = np.arange(total)
    starts = rng.random((rows, total)) < 1.0 / 800
    ends = np.where(starts, when + rng.geometric(1.0 / 25, (rows, total)), 0)
    active = np.maximum.accumulate(ends, axis=1) > when
    latest = np.maximum.accumulate(np.where(starts, when, 0), axis=1)
    strength = np.take_along_axis(rng.uniform(0.10, 0.25, (rows, total)), latest, axis=1)
    return 0.7 * iid(rng, rows, length) + (active * strength)[:, BURN_IN:]


def mix(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Correlation, a heavy tail and a neighbour, all at once."""
    return (
        0.5 * autoregression(0.9)(rng, rows, length)
        + 0.4 * heavy_tail(rng, rows, length)
        + 0.5 * bursts(rng, rows, length)
    )


KINDS: dict[str, Noise] = {
    "iid": iid,
    "AR(0.9)": autoregression(0.9),
    "AR(0.99)": autoregression(0.99),
    "drift": drift,
    "ramp": ramp,
    "two clock states": two_states,
    "heavy tail": heavy_tail,
    "neighbour bursts": bursts,
    "mix": mix,
}


def true_quantile(noise: Noise, quantile: float, length: int, seed: int = 99) -> float:
    """The quantile of the law of all samples of a line, from four million of them.

    For `ramp` it is that of the level it ends at, which is what a warm-up leads to.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, 4_000_000 // length)
    chosen = iid if noise is ramp else noise
    return float(np.quantile(chosen(rng, rows, length), quantile))


def pair_differences(
    noise: Noise, rng: np.random.Generator, rows: int, pairs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log ratios B over A of pairs of blocks laid on one line, in random order and in fixed order.

    Returns:
        Two arrays of shape (rows, pairs) from the same line: the order of each pair by coin, and
        always A before B.
    """
    line = noise(rng, rows, pairs * 2 * BLOCK).reshape(rows, pairs, 2, BLOCK)
    medians = np.median(line[..., DISCARDED:], axis=3)
    fixed = medians[..., 1] - medians[..., 0]
    coin = np.where(rng.random((rows, pairs)) < 0.5, 1.0, -1.0)
    return fixed * coin, fixed
