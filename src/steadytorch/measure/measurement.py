"""The result of measuring: all samples, and what may be said of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from steadytorch.errors import UsageError
from steadytorch.measure.statistics import effective_size, quantile_interval

P99_NEEDS = 1000
"""p99 is reported from this many effective samples on: ten lie beyond it."""


class Measurement(msgspec.Struct, frozen=True):
    """Samples of one series and their summary. All times are nanoseconds per iteration.

    Attributes:
        metric: `period` or `latency`; see `measure.sampler`.
        median_ns: the headline.
        median_ci_ns: 95 % interval of the median, or None; then `why_no_ci` says why.
        p90_ns: 90th percentile.
        p99_ns: 99th percentile, None below 1,000 effective samples.
        max_ns: the slowest sample.
        mean_ns: arithmetic mean, for throughput.
        cv: standard deviation over mean.
        p99_over_median: ratio, None where p99 is.
        samples_ns: every sample in the order taken, none dropped.
    """

    metric: str
    median_ns: float
    median_ci_ns: tuple[float, float] | None
    why_no_ci: str | None
    p90_ns: float
    p99_ns: float | None
    max_ns: float
    mean_ns: float
    cv: float
    p99_over_median: float | None
    samples_ns: tuple[int, ...]


def summarize(samples_ns: Sequence[int], metric: str = "period") -> Measurement:
    """Summarises a series of timings.

    Args:
        samples_ns: durations in ns, in the order taken; all positive and finite.
        metric: what they are.

    Raises:
        UsageError: no samples, or one that is not a positive finite number.
    """
    samples = np.asarray(samples_ns, dtype=np.float64)
    if samples.ndim != 1 or len(samples) == 0:
        raise UsageError("summarize needs a flat, non-empty series of durations in nanoseconds")
    wrong = np.flatnonzero(~np.isfinite(samples) | (samples <= 0))
    if len(wrong):
        at = int(wrong[0])
        raise UsageError(
            f"sample {at} is {samples_ns[at]}: durations must be positive finite nanoseconds"
        )
    median = float(np.median(samples))
    interval, why = quantile_interval(samples, 0.5)
    p99 = float(np.quantile(samples, 0.99)) if effective_size(samples, 0.99) >= P99_NEEDS else None
    mean = float(samples.mean())
    return Measurement(
        metric=metric,
        median_ns=median,
        median_ci_ns=interval,
        why_no_ci=why,
        p90_ns=float(np.quantile(samples, 0.9)),
        p99_ns=p99,
        max_ns=float(samples.max()),
        mean_ns=mean,
        cv=float(samples.std(ddof=1) / mean) if len(samples) > 1 else 0.0,
        p99_over_median=None if p99 is None else p99 / median,
        samples_ns=tuple(int(s) for s in samples_ns),
    )
