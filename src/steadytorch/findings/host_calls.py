"""Locate host calls in a trace: by name, by step, and by the operator around them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from steadytorch.findings.finding import Abstention
from steadytorch.ledger.ledger import Ledger
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import by_name
from steadytorch.traces.intervals import firsts, innermost
from steadytorch.traces.steps import MARK


@dataclass(frozen=True, eq=False)
class Steady:
    """Trace events (rows) that begin in steady steps, as selected by `steady`.

    Attributes:
        rows: the rows, int64, shape (rows,).
        steps: number of steps that count as steady.
        hit: number of these steps that hold at least one row.
        sure: whether the trace marks its steps; if not, its second half counts as steady.
        early: number of rows before the steady steps.
    """

    rows: np.ndarray
    steps: int
    hit: int
    sure: bool
    early: int


def steps_of(ledger: Ledger, times_ns: np.ndarray) -> np.ndarray:
    """Index of the step in `ledger.steps` that contains each time, int64; -1 outside all steps."""
    starts = np.asarray([step.start_ns for step in ledger.steps], dtype=np.int64)
    ends = np.asarray([step.end_ns for step in ledger.steps], dtype=np.int64)
    if not len(starts):
        return np.full(np.shape(times_ns), -1, dtype=np.int64)
    places = np.searchsorted(starts, times_ns, side="right") - 1
    inside = (places >= 0) & (times_ns <= ends[places.clip(min=0)])
    return np.where(inside, places, -1)


def steady(trace: Trace, ledger: Ledger, rows: np.ndarray) -> Steady:
    """Select the trace events (rows) that begin in steady steps.

    The first of several marked steps is excluded, because it may still be warming up. Without step
    marks, or with only the first step of a run, the second half of the trace counts as steady.
    """
    begin = trace.events.start_ns[rows]
    if not ledger.marked or (len(ledger.steps) == 1 and ledger.steps[0].index == 0):
        middle = _middle(ledger)
        late = begin >= middle
        hit = int(bool(late.any()))
        return Steady(rows[late], 1, hit, False, int((~late).sum()))
    places = steps_of(ledger, begin)
    first = 1 if len(ledger.steps) > 1 else 0
    late = places >= first
    hit = len(np.unique(places[late]))
    early = int(((places >= 0) & ~late).sum())
    return Steady(rows[late], len(ledger.steps) - first, hit, True, early)


def callers(trace: Trace, rows: np.ndarray) -> list[str]:
    """Name each host call's caller: outermost operator, innermost annotation or the call itself.

    Step marks are ignored.
    """
    events, unmarked = trace.events, rf"(?!{MARK.pattern}$).*"
    operators = by_name(trace, (Category.CPU_OP,), unmarked)
    annotations = by_name(trace, (Category.ANNOTATION,), unmarked)
    found = rows.copy()
    for thread in np.unique(events.thread[rows]):
        here = np.flatnonzero(events.thread[rows] == thread)
        begun, ended = events.start_ns[rows[here]], events.end_ns[rows[here]]
        named = annotations[events.thread[annotations] == thread]
        place = innermost(events.start_ns[named], events.end_ns[named], begun)
        around = np.where(place >= 0, named[place] if len(named) else -1, -1)
        mine = operators[events.thread[operators] == thread]
        places, spans = firsts(events.start_ns[mine], events.end_ns[mine])
        if len(places):
            at = np.searchsorted(spans.start, begun, side="right") - 1
            outer = mine[places[at.clip(min=0)]]
            inside = (at >= 0) & (events.end_ns[outer] >= ended) & (outer != rows[here])
            around = np.where(inside, outer, around)
        found[here] = np.where(around >= 0, around, rows[here])
    return [trace.name_of(int(row)) for row in found]


def tally(trace: Trace, rows: np.ndarray, most: int = 3) -> str:
    """Format the number of events of each name: `cudaMalloc (12), cudaFree (3)`."""
    counts = Counter(trace.name_of(int(row)) for row in rows)
    listed = [f"{name} ({count})" for name, count in counts.most_common(most)]
    return ", ".join([*listed, *(["..."] if len(counts) > most else [])])


def spent_ns(trace: Trace, rows: np.ndarray) -> int:
    """Time that trace events cover on their threads, in ns; overlaps count once."""
    events, total = trace.events, 0
    for thread in np.unique(events.thread[rows]):
        mine = rows[events.thread[rows] == thread]
        order = np.argsort(events.start_ns[mine], kind="stable")
        starts, ends = events.start_ns[mine][order], events.end_ns[mine][order]
        reached = np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]])
        total += int((ends - np.maximum(starts, reached)).clip(min=0).sum())
    return total


def owned_ns(trace: Trace, ledger: Ledger, name: str, rows: np.ndarray) -> int:
    """Time in one ledger slice that is attributed to the given events, in ns over all steps."""
    if name not in ledger.names:
        return 0
    owners, lengths = ledger.idle_of(name)
    return int(lengths[np.isin(owners, rows)].sum())


def _middle(ledger: Ledger) -> int:
    return (ledger.steps[0].start_ns + ledger.steps[-1].end_ns) // 2 if ledger.steps else 0


def unmarked(rule: str, what: str) -> Abstention:
    """Abstention for an event that only matters in steady steps, in a trace without step marks."""
    return Abstention(
        rule,
        f"{what} occurs early in a trace without step marks: it may be warm-up",
        "profile with torch.profiler.schedule(wait=1, warmup=2, active=5) and call prof.step() "
        "after every step",
    )
