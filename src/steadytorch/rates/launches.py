"""Join GPU events with the host call and the operator that launched them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.operator_work import WRAPPERS, Work, work_of
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.intervals import innermost, parents, self_times
from steadytorch.traces.steps import gpu_rows, launch_rows


@dataclass(frozen=True, eq=False)
class Operators:
    """The operators of a trace and their nesting.

    Attributes:
        trace: the trace.
        parent: row of the calling operator for every row of the trace, int64; -1 if there is none,
            and for rows that are not operators.
    """

    trace: Trace
    parent: np.ndarray

    def at(self, threads: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """Row of the innermost operator running on each thread at each time; -1 if none."""
        found = np.full(len(moments), -1, dtype=np.int64)
        for rows in _by_thread(self.trace):
            mine = np.flatnonzero(threads == self.trace.events.thread[rows[0]])
            if len(mine):
                start, end = self.trace.events.start_ns[rows], self.trace.events.end_ns[rows]
                places = innermost(start, end, moments[mine])
                found[mine] = np.where(places >= 0, rows[places], -1)
        return found

    def own_ns(self) -> np.ndarray:
        """Self time of each operator in ns, without its callees; int64, by trace row."""
        own = np.zeros(len(self.trace.events), dtype=np.int64)
        for rows in _by_thread(self.trace):
            events = self.trace.events
            places, spans = self_times(events.start_ns[rows], events.end_ns[rows])
            np.add.at(own, rows[places], spans.end - spans.start)
        return own

    @cached_property
    def works(self) -> tuple[np.ndarray, tuple[Work, ...]]:
        """The index of each trace row's `Work` (-1 if unknown), and the distinct `Work` values."""
        events = self.trace.events
        rows = events.of(Category.CPU_OP)
        pairs, which = np.unique(
            np.stack([events.name[rows], events.inputs[rows]]), axis=1, return_inverse=True
        )
        found: list[Work] = []
        index = np.full(pairs.shape[1], -1, dtype=np.int64)
        for place, (name, inputs) in enumerate(pairs.T):
            recorded = self.trace.inputs[inputs] if inputs >= 0 else None
            work = work_of(self.trace.names[name], recorded)
            if work is not None:
                index[place] = len(found)
                found.append(work)
        by_row = np.full(len(events), -1, dtype=np.int64)
        by_row[rows] = index[which.reshape(-1)]
        return by_row, tuple(found)

    @cached_property
    def charged(self) -> np.ndarray:
        """For each operator, the row of the operator that its time counts for.

        That is the outermost operator with known work: itself or a caller. An operator such as
        `aten::relu` or `aten::mean` calls others with known work, which is part of its own. A
        wrapper operator such as `aten::linear` is skipped if it calls an operator with known work.
        The array is int64, indexed by trace row; -1 means that no operator with known work was
        found.
        """
        known = self.works[0] >= 0
        wraps = self.named(WRAPPERS)
        covers = np.zeros(len(known), dtype=bool)
        above = self.parent[known]
        while len(above := np.unique(above[above >= 0])):
            above = above[~covers[above]]
            covers[above] = True
            above = self.parent[above]
        nearest = self.nearest(known & ~(wraps & covers))
        found = nearest
        while True:
            caller = np.where(found >= 0, self.parent[found], -1)
            further = np.where(caller >= 0, nearest[caller], -1)
            if (further < 0).all():
                return found
            found = np.where(further >= 0, further, found)

    def nearest(self, wanted: np.ndarray) -> np.ndarray:
        """Row of the nearest wanted operator for each trace row: itself or a caller; -1 if none.

        Args:
            wanted: by row of the trace, bool.
        """
        found = np.arange(len(wanted))
        found[self.trace.events.category != Category.CPU_OP] = -1
        while (pending := (found >= 0) & ~wanted[found]).any():
            found = np.where(pending, self.parent[found], found)
        return found

    def named(self, names: Collection[str]) -> np.ndarray:
        """Boolean mask of the trace rows that are operators with one of the given names."""
        places = [place for place, name in enumerate(self.trace.names) if name in names]
        events = self.trace.events
        return np.isin(events.name, places) & (events.category == Category.CPU_OP)


@lru_cache(maxsize=1)
def operators_of(trace: Trace) -> Operators:
    """Operators of a trace; the last result is cached."""
    parent = np.full(len(trace.events), -1, dtype=np.int64)
    for rows in _by_thread(trace):
        places = parents(trace.events.start_ns[rows], trace.events.end_ns[rows])
        parent[rows] = np.where(places >= 0, rows[places], -1)
    return Operators(trace, parent)


@dataclass(frozen=True, eq=False)
class Launches:
    """GPU events of the profiled steps, with the call and operator that launched each event.

    All arrays have shape (events,) and are ordered by start time.

    Attributes:
        trace: the trace.
        ledger: ledger that defines the steps and the device.
        rows: rows of `trace.events`.
        call: row of the call that launched each; -1 if there is none.
        operator: row of the innermost operator around that call; -1 if there is none.
    """

    trace: Trace
    ledger: Ledger
    rows: np.ndarray
    call: np.ndarray
    operator: np.ndarray

    @property
    def steps(self) -> int:
        """Number of profiled steps, at least 1."""
        return max(1, len(self.ledger.steps))

    @cached_property
    def start_ns(self) -> np.ndarray:
        """Start time of each GPU event in ns, int64."""
        return self.trace.events.start_ns[self.rows]

    @cached_property
    def end_ns(self) -> np.ndarray:
        """End time of each GPU event in ns, int64."""
        return self.trace.events.end_ns[self.rows]

    @cached_property
    def length_ns(self) -> np.ndarray:
        """Duration of each GPU event in ns, int64."""
        return self.end_ns - self.start_ns

    def of(self, *categories: Category) -> np.ndarray:
        """Boolean mask of the GPU events in the given categories."""
        return np.isin(self.trace.events.category[self.rows], categories)

    def named(self, tells: Callable[[str], bool]) -> np.ndarray:
        """Boolean mask of the GPU events whose names satisfy a predicate."""
        return self._satisfy(tells, self.rows)

    def called(self, tells: Callable[[str], bool]) -> np.ndarray:
        """Boolean mask of the GPU events launched by host calls whose names satisfy a predicate."""
        return self._satisfy(tells, self.call) & (self.call >= 0)

    def _satisfy(self, tells: Callable[[str], bool], rows: np.ndarray) -> np.ndarray:
        wanted = np.zeros(len(self.trace.names), dtype=bool)
        names = self.trace.events.name[rows]
        for index in np.unique(names):
            wanted[index] = tells(self.trace.names[index])
        return wanted[names]


@lru_cache(maxsize=1)
def launches_of(trace: Trace, ledger: Ledger) -> Launches:
    """Join the GPU events of a ledger's steps with their launches; the last result is cached."""
    events = trace.events
    rows = gpu_rows(trace, ledger.device)
    if ledger.steps:
        first, last = ledger.steps[0].start_ns, ledger.steps[-1].end_ns
        rows = rows[(events.start_ns[rows] >= first) & (events.start_ns[rows] < last)]
    call = launch_rows(trace, rows)
    # Use the middle: in whole microseconds, the ends of a call touch its neighbours.
    middle = (events.start_ns[call] + events.end_ns[call]) // 2
    operator = operators_of(trace).at(events.thread[call], middle)
    operator[call < 0] = -1
    return Launches(trace, ledger, rows, call, operator)


def _by_thread(trace: Trace) -> list[np.ndarray]:
    """Trace rows of the operators with nonzero duration, one array for each thread."""
    events = trace.events
    rows = events.of(Category.CPU_OP)
    rows = rows[events.end_ns[rows] > events.start_ns[rows]]
    order = np.argsort(events.thread[rows], kind="stable")
    rows = rows[order]
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(np.diff(events.thread[rows])) + 1)
