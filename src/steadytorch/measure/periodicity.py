"""Removes periodic parts from a series before its correlation is estimated.

Periodic parts come, for example, from another process that runs at fixed intervals, or from the
control loop of a fan or clock. A lag window that ends inside a period makes confidence intervals
too wide or too narrow. Spectral lines are therefore fitted and removed; only the unfinished last
period stays uncertain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 200
"""Minimum series length; in shorter ones, ordinates are too far apart for a neighbourhood."""
FALSE = 1e-3
"""Nominal probability of a false line. It is near 5 % in practice, because few neighbours set the
level. False lines are small: in simulation, intervals keep their coverage."""
NEIGHBOURS = 9
"""Ordinates on each side; their median is the level that a line must exceed."""
GAP = 1
"""Ordinates skipped next to the peak, because a line between two ordinates leaks into both."""
MOST = 8
"""Maximum number of removed lines."""
FINER = 8
"""Frequencies tested between adjacent ordinates."""


class Rest(NamedTuple):
    """A series without its periodic lines.

    Attributes:
        series: the remaining series around its mean, shape (N,).
        share: remaining share of the variance.
        shift: shift of the mean by unfinished periods, in units of the series.
    """

    series: np.ndarray
    share: float
    shift: float


def without_lines(series: np.ndarray) -> Rest:
    """Remove the strongest spectral line repeatedly, until none is significant.

    Args:
        series: shape (N,).
    """
    count = len(series)
    rest = series - series.mean()
    whole = float(rest @ rest)
    if count < LEAST or whole == 0.0:
        return Rest(rest, 1.0, 0.0)
    when, shift = np.arange(count), 0.0
    for _ in range(MOST):
        periods = _clearest(rest)
        if periods is None:
            break
        angle = 2 * np.pi * periods / count * when
        waves = np.stack([np.cos(angle), np.sin(angle), np.ones(count)], axis=1)
        weights = np.linalg.lstsq(waves, rest, rcond=None)[0]
        line = waves[:, :2] @ weights[:2]
        shift += float(line.mean())
        rest = rest - line
        rest -= rest.mean()
    return Rest(rest, float(rest @ rest) / whole, shift)


def _clearest(series: np.ndarray) -> float | None:
    """Return the strongest spectral line, in periods per series; None if not significant.

    Ordinates of the periodogram are exponentially distributed around the spectrum. The largest of n
    ordinates therefore exceeds ln(n / p) times the spectrum with probability p (Fisher, "Tests of
    significance in harmonic analysis", 1929). The spectrum is estimated locally, because the
    spectrum of correlated noise is not flat. The first ordinate is never chosen, because a trend
    looks like a line at the lowest frequency.
    """
    count = len(series)
    power = np.abs(np.fft.rfft(series, FINER * count)) ** 2
    ordinates = power[FINER : FINER * (count // 2) : FINER]
    ratios = ordinates / np.maximum(_surroundings(ordinates), np.finfo(np.float64).tiny)
    peak = int(np.argmax(ratios[1:])) + 2
    if ratios[peak - 1] < np.log(len(ordinates) / FALSE):
        return None
    around = power[FINER * (peak - 1) : FINER * (peak + 1) + 1]
    return peak - 1 + int(np.argmax(around)) / FINER


def _surroundings(ordinates: np.ndarray) -> np.ndarray:
    """Estimate the spectrum around each ordinate: the higher median of its two sides."""
    count, reach = len(ordinates), NEIGHBOURS + GAP
    padded = np.pad(ordinates, reach, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, NEIGHBOURS)
    # The median of an exponential distribution is ln 2 times its mean.
    levels = np.median(windows, axis=1) / np.log(2)
    return np.maximum(levels[:count], levels[reach + GAP + 1 :][:count])
