"""Attribute the variance of step times to slices, and describe the slowest steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadytorch.ledger.conditions import Conditions, unusual
from steadytorch.ledger.ledger import Ledger
from steadytorch.ledger.repeated_kernels import Repeats, repeats
from steadytorch.quantities import counted
from steadytorch.results.explain import KernelSplit, SlowStep
from steadytorch.traces.events import Trace
from steadytorch.traces.kernel_names import short

FEWEST = 3
"""Minimum steps for a covariance: two steps always correlate fully."""
SLOWEST = 5
"""Maximum slow steps reported."""
SLOW = 0.01
"""Minimum excess of a slow step over the median step, as a share of it."""
TOLD = 0.1
"""Minimum share of a step's excess for a difference to be reported."""
NAME = 80
"""Maximum characters shown of an event's name."""


@dataclass(frozen=True)
class VarianceShares:
    """Sources of the variance of step times, and the slowest steps.

    Attributes:
        shares: cov(slice, step) / var(step) by slice. They add up to 1. The share is negative for a
            slice that tends to be shorter in longer steps. None, with `reason`, if undefined.
        reason: why `shares` is None; else None.
        slowest: slowest steps, slowest first.
        kernels: the share of `gpu_kernel`, split by cause; None without shares or without a GPU.
    """

    shares: dict[str, float] | None
    reason: str | None
    slowest: tuple[SlowStep, ...]
    kernels: KernelSplit | None


def variance_shares(
    trace: Trace, ledger: Ledger, conditions: Sequence[Conditions] = ()
) -> VarianceShares:
    """Attribute the variance of the steps to slices, and describe the slowest steps.

    The slices add up to the step time, so their covariances with the step time add up to its
    variance.

    Args:
        trace: the trace.
        ledger: ledger of that trace.
        conditions: telemetry of each step, from `conditions.join`; may be empty.
    """
    total = np.array([step.total_ns for step in ledger.steps], np.float64)
    slices = {
        name: np.array([step.slices[name] for step in ledger.steps], np.float64)
        for name in ledger.names
    }
    if len(total) < FEWEST:
        reason = f"{counted(len(total), 'step')}: variance shares need at least {FEWEST}, better 10"
        return VarianceShares(None, reason, (), None)
    again = repeats(trace, ledger) if ledger.kind == "gpu" else None
    slowest = _slowest(trace, ledger, total, slices, again, conditions)
    if not np.ptp(total):
        return VarianceShares(None, "all steps took the same time", slowest, None)
    shares = {name: share_of_variance(values, total) for name, values in slices.items()}
    split = None
    if again is not None:
        more = share_of_variance(again.usual_ns, total)
        split = KernelSplit(more, shares["gpu_kernel"] - more)
    return VarianceShares(shares, None, slowest, split)


def share_of_variance(part: np.ndarray, total: np.ndarray) -> float:
    """Return cov(part, total) / var(total), for arrays with one value per step."""
    off = total - total.mean()
    return float((part - part.mean()) @ off / (off @ off))


def _slowest(
    trace: Trace,
    ledger: Ledger,
    total: np.ndarray,
    slices: dict[str, np.ndarray],
    again: Repeats | None,
    conditions: Sequence[Conditions],
) -> tuple[SlowStep, ...]:
    median = float(np.median(total))
    slow = [
        place
        for place in np.argsort(-total, kind="stable")[:SLOWEST].tolist()
        if total[place] - median > SLOW * median
    ]
    found = []
    for place in slow:
        excess = float(total[place] - median)
        lines = _differences(trace, ledger, place, excess, slices)
        if again is not None:
            lines += _kernel_lines(trace, again, place, excess)
        if conditions:
            lines += [(0.0, text) for text in unusual(conditions, place)]
        lines.sort(key=lambda line: -line[0])
        step = ledger.steps[place]
        what = tuple(text for _, text in lines)
        found.append(SlowStep(place, step.name, step.total_ns, round(excess), what))
    return tuple(found)


def _differences(
    trace: Trace, ledger: Ledger, place: int, excess: float, slices: dict[str, np.ndarray]
) -> list[tuple[float, str]]:
    """Describe the slices that took longer than usual in one step."""
    lines = []
    for name, values in slices.items():
        usual = float(np.median(values))
        over = float(values[place] - usual)
        if over >= TOLD * excess and name != "gpu_kernel":
            text = f"{name} {_ms(values[place])}, usually {_ms(usual)}"
            lines.append((over, text + _longest(trace, ledger, place, name)))
    return lines


def _longest(trace: Trace, ledger: Ledger, place: int, name: str) -> str:
    """Describe the event that owns most of a slice in one step."""
    owned, step = ledger.owned, ledger.steps[place]
    mine = (owned.slice == ledger.names.index(name)) & (owned.row >= 0)
    mine &= (owned.start_ns >= step.start_ns) & (owned.end_ns <= step.end_ns)
    if not mine.any():
        return ""
    rows, which = np.unique(owned.row[mine], return_inverse=True)
    time = np.bincount(which, weights=(owned.end_ns - owned.start_ns)[mine])
    most = int(np.argmax(time))
    return f" (mostly {trace.name_of(int(rows[most]))[:NAME]}, {_ms(time[most])})"


def _kernel_lines(
    trace: Trace, again: Repeats, place: int, excess: float
) -> list[tuple[float, str]]:
    """Describe the extra and the slower kernels of one step, one line each."""
    lines = []
    more = float(again.usual_ns[place] - np.median(again.usual_ns))
    if more >= TOLD * excess:
        extra = int(again.count[place] - np.median(again.count))
        text = f"gpu_kernel: {extra:+d} kernels, {_ms(more)} more"
        lines.append((more, text + _named(trace, again.extra(place))))
    slower = float(again.slower_ns[place] - np.median(again.slower_ns))
    if slower >= TOLD * excess:
        usual = float(again.usual_ns[place])
        text = f"gpu_kernel: the same kernels took {_ms(slower)} longer"
        text += f" ({100 * slower / usual:.1f} %)" if usual else ""
        lines.append((slower, text + _named(trace, again.slowed(place))))
    return lines


def _named(trace: Trace, kernel: tuple[int, float] | None) -> str:
    if kernel is None:
        return ""
    return f"; mostly {short(trace.names[kernel[0]])}, {_ms(kernel[1])}"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f} ms"
