"""Who launched what: GPU events joined with the host's call and the operator around it."""

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
    """The operators of a trace, nested as they called each other.

    Attributes:
        trace: where they are.
        parent: the row of the calling operator, for every row of the trace, int64; -1 where there
            is none, and for what is no operator.
    """

    trace: Trace
    parent: np.ndarray

    def at(self, threads: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """The innermost operator open on each thread at each moment; -1 where none is."""
        found = np.full(len(moments), -1, dtype=np.int64)
        for rows in _by_thread(self.trace):
            mine = np.flatnonzero(threads == self.trace.events.thread[rows[0]])
            if len(mine):
                start, end = self.trace.events.start_ns[rows], self.trace.events.end_ns[rows]
                places = innermost(start, end, moments[mine])
                found[mine] = np.where(places >= 0, rows[places], -1)
        return found

    def own_ns(self) -> np.ndarray:
        """Time that each operator spent itself, not in those it called; int64, by row."""
        own = np.zeros(len(self.trace.events), dtype=np.int64)
        for rows in _by_thread(self.trace):
            events = self.trace.events
            places, spans = self_times(events.start_ns[rows], events.end_ns[rows])
            np.add.at(own, rows[places], spans.end - spans.start)
        return own

    @cached_property
    def works(self) -> tuple[np.ndarray, tuple[Work, ...]]:
        """Index into the works, by row, -1 where unknown; every work once."""
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
        """The operator whose known work each operator is a part of, itself or one that called it.

        int64, by row; -1 where no such work is known. Work that a wrapper passes on to an operator
        whose work is known too is that operator's alone.
        """
        known = self.works[0] >= 0
        wraps = self.named(WRAPPERS)
        covers = np.zeros(len(known), dtype=bool)
        above = self.parent[known]
        while len(above := np.unique(above[above >= 0])):
            above = above[~covers[above]]
            covers[above] = True
            above = self.parent[above]
        return self.nearest(known & ~(wraps & covers))

    def nearest(self, wanted: np.ndarray) -> np.ndarray:
        """The first wanted operator among each one itself, its caller, and so on; -1 for none.

        Args:
            wanted: by row of the trace, bool.
        """
        found = np.arange(len(wanted))
        found[self.trace.events.category != Category.CPU_OP] = -1
        while (pending := (found >= 0) & ~wanted[found]).any():
            found = np.where(pending, self.parent[found], found)
        return found

    def named(self, names: Collection[str]) -> np.ndarray:
        """Which rows are operators of these names, as a mask."""
        places = [place for place, name in enumerate(self.trace.names) if name in names]
        events = self.trace.events
        return np.isin(events.name, places) & (events.category == Category.CPU_OP)


@lru_cache(maxsize=1)
def operators_of(trace: Trace) -> Operators:
    """The operators of a trace; the last one asked for is kept."""
    parent = np.full(len(trace.events), -1, dtype=np.int64)
    for rows in _by_thread(trace):
        places = parents(trace.events.start_ns[rows], trace.events.end_ns[rows])
        parent[rows] = np.where(places >= 0, rows[places], -1)
    return Operators(trace, parent)


@dataclass(frozen=True, eq=False)
class Launches:
    """The GPU events of the steps of a ledger. Arrays have the shape (events,), in order of start.

    Attributes:
        trace: where they are.
        ledger: whose steps and device they are of.
        rows: of `trace.events`.
        call: the row of the call that launched each; -1 where there is none.
        operator: the row of the innermost operator around that call; -1 where there is none.
    """

    trace: Trace
    ledger: Ledger
    rows: np.ndarray
    call: np.ndarray
    operator: np.ndarray

    @property
    def steps(self) -> int:
        """How many steps there are; at least 1."""
        return max(1, len(self.ledger.steps))

    @cached_property
    def start_ns(self) -> np.ndarray:
        """When each began, int64."""
        return self.trace.events.start_ns[self.rows]

    @cached_property
    def end_ns(self) -> np.ndarray:
        """When each ended, int64."""
        return self.trace.events.end_ns[self.rows]

    @cached_property
    def length_ns(self) -> np.ndarray:
        """How long each took, int64."""
        return self.end_ns - self.start_ns

    def of(self, *categories: Category) -> np.ndarray:
        """Which are of these categories, as a mask."""
        return np.isin(self.trace.events.category[self.rows], categories)

    def named(self, tells: Callable[[str], bool]) -> np.ndarray:
        """Whose names satisfy a test, as a mask."""
        return self._satisfy(tells, self.rows)

    def called(self, tells: Callable[[str], bool]) -> np.ndarray:
        """Which were launched by calls whose names satisfy a test, as a mask."""
        return self._satisfy(tells, self.call) & (self.call >= 0)

    def _satisfy(self, tells: Callable[[str], bool], rows: np.ndarray) -> np.ndarray:
        wanted = np.zeros(len(self.trace.names), dtype=bool)
        names = self.trace.events.name[rows]
        for index in np.unique(names):
            wanted[index] = tells(self.trace.names[index])
        return wanted[names]


@lru_cache(maxsize=1)
def launches_of(trace: Trace, ledger: Ledger) -> Launches:
    """Joins the GPU events of a ledger's steps and device; the last one asked for is kept."""
    events = trace.events
    rows = gpu_rows(trace, ledger.device)
    if ledger.steps:
        first, last = ledger.steps[0].start_ns, ledger.steps[-1].end_ns
        rows = rows[(events.start_ns[rows] >= first) & (events.start_ns[rows] < last)]
    call = launch_rows(trace, rows)
    # Its middle: with whole microseconds the ends of a call touch those of its neighbours.
    middle = (events.start_ns[call] + events.end_ns[call]) // 2
    operator = operators_of(trace).at(events.thread[call], middle)
    operator[call < 0] = -1
    return Launches(trace, ledger, rows, call, operator)


def _by_thread(trace: Trace) -> list[np.ndarray]:
    """Rows of operators that last, for each thread, in order."""
    events = trace.events
    rows = events.of(Category.CPU_OP)
    rows = rows[events.end_ns[rows] > events.start_ns[rows]]
    order = np.argsort(events.thread[rows], kind="stable")
    rows = rows[order]
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(np.diff(events.thread[rows])) + 1)
