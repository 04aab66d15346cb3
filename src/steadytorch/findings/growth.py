"""Detect steps that keep getting slower."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steadytorch.findings.finding import Case
from steadytorch.findings.host_calls import steps_of
from steadytorch.traces.steps import gpu_rows

MOST_OVER_MEDIAN = 1.5
"""Minimum ratio of the slowest part to the median part."""
PARTS = 10
FEWEST = 5
"""Minimum number of parts: five in rising order are chance once in 120."""


@dataclass(frozen=True)
class Growth:
    """A rising time series: name, number of parts, and step time in the first and last part."""

    what: str
    blocks: int
    first_ns: float
    last_ns: float


def growth(case: Case) -> Growth | None:
    """Growth of the timed samples or, without samples, of kernel time in comparable steps."""
    if case.series is not None:
        samples = np.asarray(case.series.durations_ns, dtype=np.float64)
        return _grows("samples", samples)
    if case.trace is None or case.ledger is None or case.ledger.kind != "gpu":
        return None
    trace, ledger = case.trace, case.ledger
    rows = gpu_rows(trace, ledger.device)
    places = steps_of(ledger, trace.events.end_ns[rows])
    counts = np.bincount(places[places >= 0], minlength=len(ledger.steps))
    # More kernels mean more work, not a lower clock.
    if not len(counts) or counts.max() > 1.02 * counts.min():
        return None
    kernels = np.asarray([step.slices.get("gpu_kernel", 0) for step in ledger.steps], float)
    return _grows("kernel time of steps with the same number of kernels", kernels)


def _grows(what: str, times: np.ndarray) -> Growth | None:
    if len(times) < FEWEST:
        return None
    parts = np.array_split(times, min(PARTS, len(times)))
    middles = np.asarray([np.median(part) for part in parts])
    rising = bool((np.diff(middles) > 0).all())
    if not rising or middles[-1] <= MOST_OVER_MEDIAN * np.median(middles):
        return None
    return Growth(what, len(parts), float(middles[0]), float(middles[-1]))
