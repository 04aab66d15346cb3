"""Find the steps of a trace, and the call that launched each GPU event."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from steadytorch.traces.events import Category, Trace

MARK = re.compile(r"ProfilerStep#(\d+)")
"""Name of the step marks that the profiler's `step()` writes."""
WHOLE = "whole trace"

CALLS = (Category.RUNTIME, Category.DRIVER)
"""Calls of the CUDA runtime and driver."""
HOST = (Category.CPU_OP, *CALLS)
"""Events that show a host thread working for the GPU or on operators."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the workload.

    Attributes:
        index: number in its mark, 5 for "ProfilerStep#5"; 0 for the whole trace.
        name: "ProfilerStep#5" or "whole trace".
        start_ns: from the trace's origin.
        end_ns: from the trace's origin; the next step starts no earlier.
        slices: ns by slice; they add up to `total_ns`.
    """

    index: int
    name: str
    start_ns: int
    end_ns: int
    slices: dict[str, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """Length of the step."""
        return self.end_ns - self.start_ns


def gpu_rows(trace: Trace, device: int) -> np.ndarray:
    """Return rows of the events that keep this GPU busy, in order."""
    rows = trace.on_gpu
    return rows[trace.events.device[rows] == device]


def busiest_device(trace: Trace) -> int | None:
    """Return the GPU with the most total event time; None if the trace has no GPU events."""
    events, rows = trace.events, trace.on_gpu
    if not len(rows):
        return None
    devices, place = np.unique(events.device[rows], return_inverse=True)
    busy = np.zeros(len(devices), np.int64)
    np.add.at(busy, place, events.end_ns[rows] - events.start_ns[rows])
    return int(devices[np.argmax(busy)])


def launch_rows(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Find the call that launched each GPU event in `rows`; -1 if the call is not in the trace.

    Several launch calls may share a correlation id, because of several processes or counter
    overflow. Of launch calls with the same id, the last one before the GPU event counts; if none is
    earlier, the first.

    Args:
        trace: the trace.
        rows: rows of GPU events, sorted, shape (N,).

    Returns:
        Rows of runtime or driver calls, int64, shape (N,).
    """
    events = trace.events
    calls = events.of(*CALLS)
    calls = calls[events.correlation[calls] > 0]
    calls = calls[np.isin(events.correlation[calls], events.correlation[rows])]
    if not len(calls):
        return np.full(len(rows), -1)
    both = np.concatenate([calls, rows])
    called = np.arange(len(both)) < len(calls)
    identity = events.correlation[both]
    order = np.lexsort((~called, events.start_ns[both], identity))
    latest = np.maximum.accumulate(np.where(called[order], np.arange(len(both)), -1))
    found = np.empty(len(both), np.int64)
    found[order] = np.where(latest >= 0, both[order[np.maximum(latest, 0)]], -1)
    found, wanted = found[len(calls) :], events.correlation[rows]
    own = (found >= 0) & (events.correlation[found] == wanted)

    by_identity = calls[np.argsort(events.correlation[calls], kind="stable")]
    sorted_ids = events.correlation[by_identity]
    place = np.minimum(np.searchsorted(sorted_ids, wanted), len(by_identity) - 1)
    first = np.where(sorted_ids[place] == wanted, by_identity[place], -1)
    return np.where(own, found, first)


def step_marks(trace: Trace, process: str | None = None) -> np.ndarray:
    """Return rows of the step marks of one process, in order, each step once.

    Args:
        trace: the trace.
        process: process id; marks of other processes are used only if it has none.
    """
    events = trace.events
    names = [place for place, name in enumerate(trace.names) if MARK.fullmatch(name)]
    rows = events.of(Category.ANNOTATION, Category.CPU_OP)
    rows = rows[np.isin(events.name[rows], names)]
    rows = rows[events.end_ns[rows] > events.start_ns[rows]]
    if not len(rows):
        return rows
    processes = np.array([trace.threads[thread][0] for thread in events.thread[rows]])
    chosen = process if process in processes else processes[0]
    rows = rows[processes == chosen]
    return np.sort(rows[np.unique(events.name[rows], return_index=True)[1]])


def find_steps(trace: Trace, device: int | None) -> tuple[tuple[Step, ...], np.ndarray]:
    """Find a trace's steps and their step marks; without marks, the whole trace is one step.

    A step starts at its mark on the host or at the end of the previous step, whichever is later. A
    step ends with its mark or with the last event that it launched on this GPU, whichever is later.
    Without step marks, the only step extends from the first operator, call or GPU event to the
    last. PyTorch's TensorBoard plug-in delimits steps in the same way, so step times are comparable
    with published ones.

    Args:
        trace: the trace.
        device: index of the GPU; None for the host alone.
    """
    rows = np.empty(0, np.int64) if device is None else gpu_rows(trace, device)
    calls = launch_rows(trace, rows)
    marks = step_marks(trace, _process(trace, calls))
    if not len(marks):
        return (_whole(trace, rows),), marks
    launched, before = _launched(trace, rows, calls, marks)
    steps = []
    previous = before
    for mark, last in zip(marks.tolist(), launched.tolist(), strict=True):
        name = trace.name_of(mark)
        start = max(previous, int(trace.events.start_ns[mark]))
        end = max(start, int(trace.events.end_ns[mark]), last)
        steps.append(Step(int(MARK.fullmatch(name)[1]), name, start, end))  # type: ignore[index]
        previous = end
    return tuple(steps), marks


def _process(trace: Trace, calls: np.ndarray) -> str | None:
    """Return the id of the process that launched the most of these GPU events."""
    launched: Counter[str] = Counter()
    for thread, count in enumerate(np.bincount(trace.events.thread[calls[calls >= 0]]).tolist()):
        launched[trace.threads[thread][0]] += count
    return max(launched, key=lambda process: launched[process], default=None)


def _launched(
    trace: Trace, rows: np.ndarray, calls: np.ndarray, marks: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return when GPU work ended: that of each step, and that launched before the first step."""
    events = trace.events
    last = np.full(len(marks), np.iinfo(np.int64).min)
    known = calls >= 0
    began = events.start_ns[np.where(known, calls, rows)]
    step = np.searchsorted(events.start_ns[marks], began, side="right") - 1
    within = known & (step >= 0) & (began < events.end_ns[marks[np.maximum(step, 0)]])
    np.maximum.at(last, step[within], events.end_ns[rows[within]])
    earlier = events.end_ns[rows[step < 0]]
    return last, int(earlier.max()) if len(earlier) else np.iinfo(np.int64).min


def _whole(trace: Trace, rows: np.ndarray) -> Step:
    """Return one step over all operators, calls and GPU events, without surrounding ranges."""
    events = trace.events
    shown = np.concatenate([events.of(*HOST), rows])
    if not len(shown):
        shown = np.arange(len(events))
    if not len(shown):
        return Step(0, WHOLE, 0, 0)
    return Step(0, WHOLE, int(events.start_ns[shown].min()), int(events.end_ns[shown].max()))
