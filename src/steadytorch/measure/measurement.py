"""Summaries of timing series: samples, quantiles, intervals and variability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steadytorch.errors import UsageError
from steadytorch.measure.correlation import effective_size
from steadytorch.measure.statistics import quantile_interval
from steadytorch.measure.variability import (
    describe_variability,
    find_outliers,
)
from steadytorch.measure.warmup import WarmUpVerdict, steady_part
from steadytorch.results.measure import Measurement

MOST_WARM_UP = 0.4
"""Maximum share of warm-up in a series; with more, no confidence interval is given. In a short
series, one late change of level may also be a clock with two states."""
P99_NEEDS = 1000
"""Minimum effective samples for p99: ten lie beyond it."""


def summarize(
    samples_ns: Sequence[int],
    metric: str = "period",
    *,
    causes: Mapping[int, str] | None = None,
) -> Measurement:
    """Summarize a series of timings from any source.

    Args:
        samples_ns: durations in ns, in the order taken; all positive and finite.
        metric: the kind of durations.
        causes: maps sample indices to causes; other outliers are `unattributed`.

    Raises:
        UsageError: there are no samples, or a sample is not a positive finite number.
    """
    every = _checked(samples_ns)
    verdict = steady_part(every)
    samples = every[verdict.dropped :]
    median = float(np.median(samples))
    interval, why = median_interval(samples, verdict)
    p99, p99_interval = _p99(samples, verdict)
    p99_over_median = None if p99 is None else p99 / median
    outliers = find_outliers(every, verdict.dropped, causes)
    varies = describe_variability(
        samples,
        p99_over_median=p99_over_median,
        regimes=verdict.regimes,
        outliers=len(outliers),
    )
    return Measurement(
        metric=metric,
        median_ns=median,
        median_ci_ns=interval,
        why_no_ci=why,
        p90_ns=float(np.quantile(samples, 0.9)),
        p99_ns=p99,
        max_ns=float(samples.max()),
        mean_ns=float(samples.mean()),
        cv=varies.cv,
        p99_over_median=p99_over_median,
        samples_ns=tuple(int(sample) for sample in samples_ns),
        p99_ci_ns=p99_interval,
        warmup_dropped=verdict.dropped,
        steady=verdict.steady,
        why_unsteady=verdict.note,
        outliers=outliers,
        variability=varies,
    )


def _checked(samples_ns: Sequence[int]) -> np.ndarray:
    try:
        samples = np.asarray(samples_ns, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"summarize needs durations in nanoseconds: {error}") from error
    if samples.ndim != 1 or len(samples) == 0:
        raise UsageError("summarize needs a flat, non-empty series of durations in nanoseconds")
    wrong = np.flatnonzero(~np.isfinite(samples) | (samples <= 0))
    if len(wrong):
        at = int(wrong[0])
        raise UsageError(
            f"sample {at} is {samples_ns[at]}: durations must be positive finite nanoseconds"
        )
    return samples


def median_interval(
    samples: np.ndarray, verdict: WarmUpVerdict, confidence: float = 0.95
) -> tuple[tuple[float, float] | None, str | None]:
    """Return the confidence interval of the median, or the reason why there is none.

    Args:
        samples: shape (N,), without the warm-up.
        verdict: the result of `steady_part`.
        confidence: nominal coverage.

    Returns:
        ((low, high), None) or (None, reason).
    """
    if verdict.regimes > 1:
        return None, verdict.note
    if verdict.dropped > MOST_WARM_UP * (verdict.dropped + len(samples)):
        return None, (f"the level changed {len(samples)} samples before the end: take more samples")
    return quantile_interval(samples, 0.5, confidence)


def _p99(
    samples: np.ndarray, verdict: WarmUpVerdict
) -> tuple[float | None, tuple[float, float] | None]:
    if effective_size(samples, 0.99) < P99_NEEDS:
        return None, None
    interval = quantile_interval(samples, 0.99)[0] if verdict.steady else None
    return float(np.quantile(samples, 0.99)), interval
