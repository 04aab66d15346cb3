"""Variability figures and outliers of a series of timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steadytorch.measure.warmup import TOLERANCE, slope
from steadytorch.results.measure import Outlier, Variability

UNATTRIBUTED = "unattributed"
FAR_OUT = 3.0
"""Outer fence, in interquartile ranges beyond the quartiles (J. Tukey, "Exploratory Data Analysis",
1977). Two in a million normal samples lie beyond it."""


def describe_variability(
    samples: np.ndarray, *, p99_over_median: float | None, regimes: int, outliers: int
) -> Variability:
    """Compute the variability figures of a series of durations.

    Args:
        samples: shape (N,), durations in ns in the order taken, N >= 1.
        p99_over_median: passed through.
        regimes: number of levels, passed through.
        outliers: number of outliers.
    """
    median = float(np.median(samples))
    lower, upper = np.quantile(samples, [0.25, 0.75])
    changes = np.diff(samples)
    several = len(samples) > 1
    variance = float(samples.var(ddof=1)) if several else 0.0
    return Variability(
        cv=float(np.sqrt(variance) / samples.mean()),
        robust_cv=1.4826 * float(np.median(np.abs(samples - median))) / median,
        iqr_over_median=float(upper - lower) / median,
        p99_over_median=p99_over_median,
        jitter=float(np.median(np.abs(changes))) / median if several else 0.0,
        von_neumann=float(np.mean(changes**2)) / variance if variance > 0 else None,
        drift_percent_per_minute=_drift(samples, median),
        regimes=regimes,
        outliers_per_1000=1000.0 * outliers / len(samples),
    )


def _drift(samples: np.ndarray, median: float) -> float | None:
    """Return the drift (Theil-Sen slope) in % of the median per minute; None below 10 samples."""
    if len(samples) < 10:
        return None
    # Samples are contiguous, so their cumulative sum is the elapsed time.
    return 100.0 * slope(samples, np.cumsum(samples) / 60e9) / median


def find_outliers(
    samples: np.ndarray, start: int = 0, causes: Mapping[int, str] | None = None
) -> tuple[Outlier, ...]:
    """Find the samples beyond Tukey's outer fences and at least 0.5 % from the median.

    The fences apply to the logarithms of the durations, because timings are right-skewed. The
    minimum distance of 0.5 % keeps the granularity of the clock from producing negligible outliers.

    Args:
        samples: shape (N,), durations in ns in the order taken.
        start: index at which the steady part begins; the warm-up has no outliers.
        causes: maps sample indices to causes.
    """
    logs = np.log(samples[start:])
    low, high = _fences(logs)
    known = causes or {}
    return tuple(
        Outlier(index, int(samples[index]), known.get(index, UNATTRIBUTED))
        for index in (np.flatnonzero((logs > high) | (logs < low)) + start).tolist()
    )


def slow_limit(samples: Sequence[int] | np.ndarray) -> float:
    """The duration in ns above which `find_outliers` reports a sample as an outlier.

    Args:
        samples: shape (N,), durations in ns, N >= 1.
    """
    return float(np.exp(_fences(np.log(samples))[1]))


def _fences(logs: np.ndarray) -> tuple[float, float]:
    """Lower and upper outlier limits, as logarithms of durations."""
    lower, middle, upper = np.quantile(logs, [0.25, 0.5, 0.75])
    reach = FAR_OUT * (upper - lower)
    return min(lower - reach, middle - TOLERANCE), max(upper + reach, middle + TOLERANCE)
