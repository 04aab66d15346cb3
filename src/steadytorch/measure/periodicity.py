"""Periodic parts of a series: what repeats is known, and only its unfinished period is not.

A neighbour that comes at fixed intervals, a control loop of a fan or of a clock: a window of lags
that ends somewhere in such a period adds up whatever part of it falls inside, and makes intervals
too wide or too narrow. So lines of the spectrum are fitted and taken out first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 200
"""Shorter series are left as they are: their ordinates lie too wide apart for a neighbourhood."""
FALSE = 1e-3
"""Nominal probability of seeing a line where there is none. With the level taken from so few
neighbours it is near 5 %, and what is then taken out is small: simulated, intervals hold."""
NEIGHBOURS = 9
"""Ordinates on either side, whose median is the level that a line must stand out from."""
GAP = 1
"""Ordinates left out between, into which a line that falls between two of them leaks."""
MOST = 8
"""Lines taken out at most."""
FINER = 8
"""Frequencies tried between neighbouring ordinates."""


class Rest(NamedTuple):
    """A series without its lines.

    Attributes:
        series: the rest around its mean, shape (N,).
        share: of the variance, what is left.
        shift: of the mean of the series, by unfinished periods; in units of the series.
    """

    series: np.ndarray
    share: float
    shift: float


def without_lines(series: np.ndarray) -> Rest:
    """Takes the clearest line out, again and again, until none stands out.

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
    """The clearest line, in periods over the series; None where none is one.

    Ordinates of the periodogram are exponentially distributed around the spectrum, so the largest
    of n exceeds ln(n / p) times it with probability p (R. A. Fisher, "Tests of significance in
    harmonic analysis", 1929). The spectrum is taken from the neighbourhood, because correlated
    noise is not flat; and the first ordinate is never a line, because a trend looks like it.
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
    """The spectrum beside each ordinate: the higher of the medians to its left and to its right."""
    count, reach = len(ordinates), NEIGHBOURS + GAP
    padded = np.pad(ordinates, reach, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, NEIGHBOURS)
    # The median of an exponential distribution is ln 2 times its mean.
    levels = np.median(windows, axis=1) / np.log(2)
    return np.maximum(levels[:count], levels[reach + GAP + 1 :][:count])
