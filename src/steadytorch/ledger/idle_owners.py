"""Assign each idle GPU nanosecond to the cause that delayed the next GPU event.

Each GPU event is launched by one call on one host thread. Until the launch call returns, the GPU
waits for the launching thread, or for another thread while the launching thread does nothing. After
the launch call returns, the event is queued and waits for the device. Blocking calls while the GPU
works therefore cost no idle time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import WAITS, Evidence, by_name, evidence
from steadytorch.traces.intervals import (
    EVER,
    NEVER,
    Spans,
    covered_ns,
    crossings,
    firsts,
    innermost,
    intersect,
    subtract,
    union,
)
from steadytorch.traces.steps import CALLS, HOST, launch_rows

LAUNCH_LIMIT_NS = 1_000_000
"""Maximum time that counts as launching, for one host activity or for an event in the queue of
an idle GPU. A PyTorch operator takes the host some 10 us and a launch a few, so a thousand times
that has another cause; the GPU's time slices between processes are longer."""

START_NS = 5_000
"""Maximum time in which a GPU starts the next event of its queue: usually 1 to 2 us. What waits for
longer depends on something."""

ANYWHERE = (Evidence.PROFILER, Evidence.GC)
"""Evidence that stops every thread, by Python's lock or the driver's."""
IN_ORDER = (
    Evidence.DATA_WAIT,
    Evidence.COMPILE,
    Evidence.SYNCHRONISATION,
    Evidence.ALLOCATION,
)
"""Order of precedence if several last at once: the one that causes the others first."""


NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Owned:
    """Spans of time with one owner each, sorted, not overlapping, shape (pieces,).

    Attributes:
        start_ns: int64, from the trace's origin.
        end_ns: int64.
        slice: uint8, index into the ledger's `names`.
        row: int64, row of the event that owns it; -1 if unknown.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    slice: np.ndarray
    row: np.ndarray


class TimeAllocator:
    """Assigns time to owners; time that is claimed twice goes to the first claim.

    Args:
        time: time to assign.
        names: the slices.
    """

    def __init__(self, time: Spans, names: tuple[str, ...]) -> None:
        self.left = time
        self._names = names
        self._assigned: list[Owned] = []

    def assign(self, name: str, spans: Spans, rows: np.ndarray | int = -1) -> None:
        """Assign the still unassigned parts of these spans to a slice.

        Args:
            name: the slice.
            spans: claimed time.
            rows: owner of each span, shape (spans,), or one owner of all.
        """
        if not len(self.left.start) or not len(spans.start):
            return
        _, place, got = crossings(self.left, spans)
        owner = np.broadcast_to(rows, len(spans.start))[place]
        kind = np.full(len(owner), self._names.index(name), np.uint8)
        self._assigned.append(Owned(got.start, got.end, kind, owner.astype(np.int64)))
        self.left = subtract(self.left, got)

    def owned(self) -> Owned:
        """All assigned time."""
        return merged(self._assigned)


def merged(several: list[Owned]) -> Owned:
    """Merge several `Owned` that do not overlap into one."""
    if not several:
        return Owned(*NEVER, np.empty(0, np.uint8), np.empty(0, np.int64))
    order = np.argsort(np.concatenate([owned.start_ns for owned in several]), kind="stable")
    return Owned(
        np.concatenate([owned.start_ns for owned in several])[order],
        np.concatenate([owned.end_ns for owned in several])[order],
        np.concatenate([owned.slice for owned in several])[order],
        np.concatenate([owned.row for owned in several])[order],
    )


class Host:
    """Activity of the host's threads, by thread.

    Args:
        trace: the trace.
        marks: rows of the step marks.
        threads: threads that the GPU may wait for, the main thread first.
    """

    def __init__(self, trace: Trace, marks: np.ndarray, threads: tuple[int, ...]) -> None:
        self.trace = trace
        self.marks = marks
        self.threads = threads
        kinds = evidence(trace)
        work = np.setdiff1d(trace.events.of(*HOST), marks, assume_unique=True)
        self._work = _by_thread(trace, work)
        self._evidence_rows = {kind: np.flatnonzero(kinds == kind) for kind in Evidence if kind}
        self._evidence_by_thread = {
            kind: _by_thread(trace, rows) for kind, rows in self._evidence_rows.items()
        }
        self._of_any = {kind: self._apart(rows) for kind, rows in self._evidence_rows.items()}

    def _apart(self, rows: np.ndarray) -> tuple[np.ndarray, Spans]:
        """Rows of events and their time; overlaps go to the event that began first."""
        places, spans = firsts(self.trace.events.start_ns[rows], self.trace.events.end_ns[rows])
        return rows[places], spans

    def evidence_of(self, kind: Evidence, thread: int | None) -> tuple[np.ndarray, Spans]:
        """Rows and time of one kind of evidence; overlaps go to the event that began first."""
        if thread is None:
            return self._of_any[kind]
        return self._apart(self._evidence_by_thread[kind].get(thread, NO_ROWS))

    def work_of(self, thread: int) -> np.ndarray:
        """Rows of a thread's operators and CUDA calls, without step marks."""
        return self._work.get(thread, NO_ROWS)

    def busy(self, thread: int) -> Spans:
        """Time in which at least one operator or CUDA call of this thread was running."""
        rows = self.work_of(thread)
        return union(self.trace.events.start_ns[rows], self.trace.events.end_ns[rows])

    @cached_property
    def quiet(self) -> Spans:
        """Spans longer than `LAUNCH_LIMIT_NS` in which no host activity begins or ends.

        The time before the first host event and after the last one is always included.
        """
        events = self.trace.events
        rows = np.concatenate([*map(self.work_of, self.threads), self.marks])
        edges = np.sort(np.concatenate([events.start_ns[rows], events.end_ns[rows]]))
        start, end = np.concatenate([[-EVER], edges]), np.concatenate([edges, [EVER]])
        # Not `end - start`: the difference of the limits overflows int64.
        return Spans(start, end).pick(start < end - LAUNCH_LIMIT_NS)

    def innermost(self, thread: int, moments: np.ndarray) -> np.ndarray:
        """Row of the thread's innermost event at each moment, else the main thread's, else -1."""
        events = self.trace.events
        found = np.full(len(moments), -1)
        for asked in (thread, self.threads[0]):
            if not (found < 0).any():
                break
            rows = self._shown.get(asked, NO_ROWS)
            place = innermost(events.start_ns[rows], events.end_ns[rows], moments)
            missing = (found < 0) & (place >= 0)
            found[missing] = rows[place[missing]]
        return found

    @cached_property
    def _shown(self) -> dict[int, np.ndarray]:
        """Rows of host events with a duration, by thread; step marks are excluded."""
        events = self.trace.events
        rows = events.of(*HOST, Category.ANNOTATION, Category.PYTHON)
        rows = rows[events.end_ns[rows] > events.start_ns[rows]]
        return _by_thread(self.trace, np.setdiff1d(rows, self.marks, assume_unique=True))


def _by_thread(trace: Trace, rows: np.ndarray) -> dict[int, np.ndarray]:
    """Split event rows by thread, in order."""
    thread = trace.events.thread[rows]
    order = np.argsort(thread, kind="stable")
    numbers, first = np.unique(thread[order], return_index=True)
    parts = np.split(rows[order], first[1:])
    return dict(zip(numbers.tolist(), parts, strict=False))


def own_idle(
    trace: Trace, idle: Spans, rows: np.ndarray, marks: np.ndarray, names: tuple[str, ...]
) -> Owned:
    """Assign one owner to every ns of `idle`.

    Args:
        trace: the trace.
        idle: time without any of `rows`, cut at the ends of the steps.
        rows: events of the GPU, sorted.
        marks: the step marks, sorted.
        names: slices, as `ledger.SLICES`.
    """
    events = trace.events
    place = np.searchsorted(events.start_ns[rows], idle.end)
    event = np.where(place < len(rows), rows[np.minimum(place, len(rows) - 1)], -1)
    call = np.full(len(event), -1)
    call[event >= 0] = launch_rows(trace, event[event >= 0])
    ready = np.clip(events.end_ns[call], idle.start, idle.end)
    ready[call < 0] = idle.end[call < 0]

    main = _main_thread(trace, marks, call)
    thread = np.where(call >= 0, events.thread[call], main)
    host = Host(trace, marks, (main, *np.setdiff1d(thread, [main]).tolist()))
    owned = [_in_queue(trace, Spans(ready, idle.end), event, call, names)]
    for own in host.threads:
        mine = np.flatnonzero((thread == own) & (ready > idle.start))
        if len(mine):
            allocator = TimeAllocator(Spans(idle.start[mine], ready[mine]), names)
            _ask_host(allocator, host, own)
            waiting = "idle_launch" if len(events.of(*CALLS)) else "unknown"
            allocator.assign(waiting, idle.pick(mine), call[mine])
            owned.append(allocator.owned())
    return merged(owned)


def _main_thread(trace: Trace, marks: np.ndarray, call: np.ndarray) -> int:
    """The thread of the step marks, else of most launches, else of most host events; else -1."""
    events = trace.events
    for rows in (marks, call[call >= 0], events.of(*HOST)):
        if len(rows):
            return int(np.argmax(np.bincount(events.thread[rows])))
    return -1


def _ask_host(allocator: TimeAllocator, host: Host, own: int) -> None:
    """Assign idle time before launches to causes on the launching thread, else on other threads."""
    for kind in ANYWHERE:
        rows, spans = host.evidence_of(kind, None)
        allocator.assign(_slice(kind), spans, rows)
    busy = host.busy(own)
    for kind in IN_ORDER:
        rows, spans = host.evidence_of(kind, own)
        allocator.assign(_slice(kind), spans, rows)
    for kind in IN_ORDER:
        rows, spans = host.evidence_of(kind, None)
        # Another thread's reason counts only while this thread does nothing.
        _, place, idling = crossings(subtract(allocator.left, busy), spans)
        allocator.assign(_slice(kind), idling, rows[place])
    quiet = intersect(allocator.left, host.quiet)
    middle = quiet.start + (quiet.end - quiet.start) // 2
    allocator.assign("unknown", quiet, host.innermost(own, middle))


def _slice(kind: Evidence) -> str:
    return f"idle_{kind.name.lower()}"


def _in_queue(
    trace: Trace, waits: Spans, event: np.ndarray, call: np.ndarray, names: tuple[str, ...]
) -> Owned:
    """Owners of the idle GPU time from the return of a launch call to the event's start."""
    some = np.flatnonzero(waits.end > waits.start)
    waits, event, call = waits.pick(some), event[some], call[some]
    crossing = _waited_for_stream(trace)[np.maximum(call, 0)]
    crossing |= _waited_for_gpu(trace, waits, event, call)
    late = waits.end - waits.start > LAUNCH_LIMIT_NS
    kind = np.select(
        [crossing, late],
        [names.index("idle_cross_stream"), names.index("unknown")],
        names.index("idle_launch"),
    )
    return Owned(waits.start, waits.end, kind.astype(np.uint8), event)


def _waited_for_gpu(trace: Trace, waits: Spans, event: np.ndarray, call: np.ndarray) -> np.ndarray:
    """Mask of waits that began with the event queued, and in which mostly another GPU worked.

    The trace does not record on which GPU an event depends.
    """
    events, rows = trace.events, trace.on_gpu
    rows = rows[~np.isin(events.device[rows], events.device[event])]
    others = union(events.start_ns[rows], events.end_ns[rows])
    length = waits.end - waits.start
    mostly = 2 * covered_ns(others, waits.start, waits.end) > length
    return mostly & (length > START_NS) & (events.end_ns[call] < waits.start)


def _waited_for_stream(trace: Trace) -> np.ndarray:
    """Mask of launch calls whose thread has just made a CUDA stream wait for another stream.

    The trace does not record which stream waits; the stream of the thread's next launch is assumed.
    """
    events = trace.events
    waits = by_name(trace, CALLS, WAITS.pattern)
    launches = launch_rows(trace, trace.on_gpu)
    launches = np.unique(launches[launches >= 0])
    both = np.concatenate([waits, launches])
    both = both[np.lexsort((both, events.thread[both]))]
    is_wait = np.isin(both, waits)
    after = is_wait[:-1] & ~is_wait[1:] & (events.thread[both[:-1]] == events.thread[both[1:]])
    found = np.zeros(len(events), dtype=bool)
    found[both[1:][after]] = True
    return found
