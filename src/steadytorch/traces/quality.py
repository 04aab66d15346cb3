"""Find faults in a profiler trace, and the figures that these faults make unreliable."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import msgspec
import numpy as np

from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import Evidence, evidence
from steadytorch.traces.intervals import union
from steadytorch.traces.steps import CALLS, launch_rows, step_marks

FEW = 0.01
"""Maximum share of the GPU's events with one fault, since captures begin and end mid-work.
Beyond it, figures that depend on these events are unreliable."""

CUT_SHORT = 0.8
"""Minimum share of the median step's GPU events for a complete last step. A step with fewer was
truncated: the profiler stopped before the GPU's records arrived."""

OVERHEAD = 0.05
"""Maximum share of the trace in which the profiler writes its buffers. Beyond it, host times are
the profiler's as much as the program's."""

LAST_STEP = "last step"
"""In `Quality.distrusted` if the last step was truncated."""

LAUNCHES = ("idle_launch", "idle_synchronisation", "idle_cross_stream")
"""Slices that depend on launch calls and their times."""


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of faults in a trace, and the figures that become unreliable.

    Attributes:
        gpu_events: kernels, copies and fills.
        orphans: GPU events whose launch call is not in the trace.
        negative_latency: GPU events that start before their launch call.
        worst_latency_ns: largest such lead, as a positive number; 0 without any.
        zero_timestamps: events without a time; they are not in the trace's columns.
        bad_durations: events with a negative or absurd duration, set to 0.
        overlaps: GPU events that start before an earlier one on the same stream has ended.
        overlap_ns: total overlap.
        steps: marked steps.
        last_step_share: GPU events of the last marked step over the median of earlier steps; None
            for fewer than three marked steps, or without GPU events in them.
        overhead_ns: time of the profiler's own `overhead` events on any thread, each moment once.
        distrusted: unreliable ledger slices and figures: names of slices, or "last step",
            "exclusive times".
        problems: faults, one sentence each.
        notes: other remarks, one sentence each.
    """

    gpu_events: int
    orphans: int
    negative_latency: int
    worst_latency_ns: int
    zero_timestamps: int
    bad_durations: int
    overlaps: int
    overlap_ns: int
    steps: int
    last_step_share: float | None
    overhead_ns: int
    distrusted: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def quality(trace: Trace) -> Quality:
    """Find faults in a profiler trace, and the figures that these faults make unreliable.

    The last result is cached.

    Args:
        trace: any trace.

    Returns:
        Counts, and the figures to distrust where counts exceed `FEW`, `CUT_SHORT` or `OVERHEAD`.
    """
    events, rows = trace.events, trace.on_gpu
    calls = launch_rows(trace, rows)
    orphans = calls < 0
    early = np.where(orphans, 0, events.start_ns[calls] - events.start_ns[rows])
    overlaps = _overlaps(trace, rows)
    marks = step_marks(trace)
    overhead = events.of(Category.OVERHEAD)
    overhead = overhead[evidence(trace)[overhead] == Evidence.PROFILER]
    counts = Quality(
        gpu_events=len(rows),
        orphans=int(orphans.sum()),
        negative_latency=int((early > 0).sum()),
        worst_latency_ns=int(early.max(initial=0)),
        zero_timestamps=trace.irregular.get("zero_timestamp", 0),
        bad_durations=trace.irregular.get("duration", 0),
        overlaps=len(overlaps),
        overlap_ns=int(overlaps.sum()),
        steps=len(marks),
        last_step_share=_last_step_share(trace, np.where(orphans, rows, calls), marks),
        overhead_ns=union(events.start_ns[overhead], events.end_ns[overhead]).total_ns,
    )
    found = tuple(_problems(trace, counts))
    return msgspec.structs.replace(
        counts,
        distrusted=tuple(dict.fromkeys(name for _, names in found for name in names)),
        problems=tuple(text for text, _ in found),
        notes=tuple(_notes(trace, counts)),
    )


def _resolution_ns(trace: Trace) -> int:
    """Return the time resolution of a trace in ns: 1000 or 1.

    Until 2023, the profiler rounded start and duration separately to whole microseconds.
    """
    whole = not (trace.events.start_ns % 1000).any() and not (trace.events.end_ns % 1000).any()
    return 1000 if whole else 1


def _overlaps(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Return the overlap in ns of each GPU event that overlaps an earlier one on its stream."""
    events = trace.events
    rows = rows[events.stream[rows] >= 0]
    order = rows[np.lexsort((events.start_ns[rows], events.stream[rows], events.device[rows]))]
    if not len(order):
        return np.empty(0, np.int64)
    places = np.stack([events.device[order], events.stream[order]])
    other = (places[:, 1:] != places[:, :-1]).any(axis=0)
    stream = np.concatenate([[0], np.cumsum(other)])
    # Latest end so far within each stream, in one pass: ranks of ends, offset by stream.
    ends = np.sort(events.end_ns[order])
    ranks = np.searchsorted(ends, events.end_ns[order]) + stream * len(order)
    latest = ends[np.maximum.accumulate(ranks) - stream * len(order)]
    by = latest[:-1] - events.start_ns[order][1:]
    return by[~other & (by > _resolution_ns(trace))]


def _last_step_share(trace: Trace, launches: np.ndarray, marks: np.ndarray) -> float | None:
    """Compute `Quality.last_step_share`; each GPU event belongs to the step that launched it."""
    if len(marks) < 3:
        return None
    began = trace.events.start_ns[launches]
    step = np.searchsorted(trace.events.start_ns[marks], began, side="right") - 1
    within = (step >= 0) & (began < trace.events.end_ns[marks[step]])
    each = np.bincount(step[within], minlength=len(marks))
    usual = float(np.median(each[:-1]))
    return float(each[-1]) / usual if usual else None


def _problems(trace: Trace, found: Quality) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield faults as text, each with the figures that it makes unreliable."""
    yield from _problems_of_launches(trace, found)
    events, some = found.gpu_events, FEW * found.gpu_events
    if found.zero_timestamps > some:
        yield (
            f"omitted {found.zero_timestamps:,} events without a time: the GPU was busier than "
            "shown",
            ("gpu_kernel", *LAUNCHES),
        )
    if found.overlaps > some:
        yield (
            f"{found.overlaps:,} of {events:,} GPU events overlap an earlier one on their "
            f"stream, by {found.overlap_ns / 1e6:,.3f} ms in total: single kernel times add up "
            "to more than the GPU's busy time. Causes are kernels that start early, or branches "
            "of a CUDA graph",
            ("exclusive times",),
        )
    if found.last_step_share is not None and found.last_step_share < CUT_SHORT:
        yield (
            f"the last step has {found.last_step_share:.0%} of the GPU events of the others: the "
            "capture was truncated; that step is left out",
            (LAST_STEP,),
        )
    span = int(trace.events.end_ns.max(initial=1))
    if found.overhead_ns > OVERHEAD * span:
        yield (
            f"the profiler's own work took {found.overhead_ns / 1e6:,.3f} ms, "
            f"{found.overhead_ns / span:.0%} of the trace: record fewer steps, without stacks",
            ("idle_launch", "idle_profiler"),
        )


def _problems_of_launches(trace: Trace, found: Quality) -> Iterator[tuple[str, tuple[str, ...]]]:
    events, some = found.gpu_events, FEW * found.gpu_events
    if events and not len(trace.events.of(*CALLS)):
        yield (
            "no CUDA calls were recorded, so the reasons for idle time are unknown; record "
            "ProfilerActivity.CPU as well",
            LAUNCHES,
        )
    elif found.orphans > some:
        yield (
            f"{found.orphans:,} of {events:,} GPU events have no launch call in the trace: the "
            "reason for idle time before them is a guess",
            LAUNCHES,
        )
    if found.negative_latency > some:
        yield (
            f"{found.negative_latency:,} of {events:,} GPU events start before their launch, by "
            f"up to {found.worst_latency_ns / 1000:,.1f} us: the clocks of host and GPU "
            "disagree, and owners of idle time of that size are arbitrary",
            LAUNCHES,
        )


def _notes(trace: Trace, found: Quality) -> Iterator[str]:
    """Yield remarks: events omitted while reading, missing records, slow recording options."""
    yield from trace.notes
    events = trace.events
    if not found.gpu_events:
        yield "no GPU events: only the host's time can be explained"
    elif not len(events.of(Category.CPU_OP)):
        yield "no operators were recorded: GPU events cannot be attributed to operators"
    if not found.steps:
        yield "no step marks: call profiler.step() after every step to tell steps apart"
    if len(events.of(Category.PYTHON)):
        yield "Python calls were recorded (with_stack), which slowed the host"
    if 0 < found.orphans <= FEW * found.gpu_events:
        yield f"{found.orphans:,} GPU events were launched before the capture began"
    if 0 < found.negative_latency <= FEW * found.gpu_events:
        yield (
            f"{found.negative_latency:,} GPU events start before their launch, by up to "
            f"{found.worst_latency_ns / 1000:,.1f} us"
        )
