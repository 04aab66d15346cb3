"""Numbers shared by findings, and functions that format numbers."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.finding import Case
from steadytorch.findings.watched_steps import WatchedSteps

MOST_LINES = 3
_UNITS_NS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))


def duration(nanoseconds: float) -> str:
    """Format a time with about three digits, such as `28.7 ms`."""
    name, size = next((u for u in _UNITS_NS if nanoseconds >= u[1]), _UNITS_NS[-1])
    value = nanoseconds / size
    return f"{value:.{0 if value >= 100 or name == 'ns' else 1 if value >= 10 else 2}f} {name}"


def percent(share: float) -> str:
    """Format a share in percent, such as `4.1 %`."""
    value = 100.0 * share
    return f"{value:.{0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2}f} %"


def amount(count: float) -> str:
    """Format a count or a mean count: `1600`, `13`, `2.5`, `0.04`."""
    return f"{count:.0f}" if count >= 10 or float(count).is_integer() else f"{count:.2g}"


def many(count: float, noun: str) -> str:
    """Format a count with its noun: `1 call`, `3 calls`, `2.5 calls`."""
    number = amount(count)
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def variance_of(case: Case, name: str) -> float | None:
    """Share of a time slice in the variance of the profiled steps; None if it is unknown."""
    shares = case.variance.shares if case.variance else None
    return shares.get(name) if shares else None


def evidence_of(steps: WatchedSteps, name: str) -> tuple[str, ...]:
    """The user's code lines seen in a time slice; then the slice's mean, median and maximum."""
    mine = steps.slices_ns[name]
    return (
        *(
            f"{where}: {percent(part)} of it"
            for where, part in steps.lines.get(name, ())[:MOST_LINES]
        ),
        f"{duration(float(mine.mean()))} a step on average, median "
        f"{duration(float(np.median(mine)))}, longest {duration(float(mine.max()))}",
    )
