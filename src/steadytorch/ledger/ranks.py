"""Compare the steps of several ranks of one job: own work, transfer, and waiting for others.

Steps are matched by number and collectives by order, never by clock, because clocks of different
machines disagree. A collective ends on all ranks after the last rank has joined and the data have
moved, so the last rank sees the shortest duration. The shortest duration counts as transfer; the
excess on other ranks counts as waiting.

On GPUs, a rank whose host is slower than its GPU would not end a step sooner if no rank were late:
its GPU would be idle instead. So a step without waiting is never shorter than the host's own time,
which is the time of its step mark without blocked CUDA calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadytorch.ledger.ledger import Ledger, build_ledger, gpu_classes
from steadytorch.ledger.operator_slices import recorded_parts
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import by_name
from steadytorch.traces.intervals import Spans, covered_ns, intersect, joined, subtract, union
from steadytorch.traces.kernel_names import communicates
from steadytorch.traces.steps import CALLS, gpu_rows

ON_HOST = r"(gloo|mpi):.*"
"""Ranges of collectives that run on the host, on threads of their own."""
IDLE = ("unknown", "cpu_python", "cpu_waiting", "cpu_communication")
"""Slices of a CPU trace that cannot hide a collective: the main thread may wait for it."""
IN_WATCH = (("cpu_forward", "cpu_backward"), ("cpu_backward",))
"""Slices of a watch's trace in which ranks may wait for one another, in the order tried. The second
choice counts `cpu_forward` as own work, to find a rank that is late there."""

LAUNCH_NS = 10_000
"""A call that takes more than twice as long counts as blocked by a full queue, beyond its usual
time. Launches take 3 to 10 us on the hosts of the traces read so far."""
SYNCHRONISES = r"cu.*Synchronize.*|cudaMemcpy(Async)?"
"""Calls that wait for the GPU by design; all of their time counts as blocked."""

Key = tuple[int, str, int]
"""A collective: number of the step, kind with process group, place among its kind in the step."""


@dataclass(frozen=True, eq=False)
class RankSteps:
    """The steps of one rank.

    Attributes:
        kind: "gpu", "cpu", or "watch" for a trace without operators.
        marked: whether the trace marks its steps; if not, all of it is step 0.
        numbers: number of each step in its mark, shape (steps,).
        time: the steps, as spans of this rank's clock; some may be empty.
        slices: slice to its time; communication that no work hides is in none.
        exposed: communication that no work hides.
        collectives: start and end of each that starts in a step.
        host_ns: own time of the host, shape (steps,); 0 without marks or without a GPU.
    """

    kind: str
    marked: bool
    numbers: tuple[int, ...]
    time: Spans
    slices: dict[str, Spans]
    exposed: Spans
    collectives: dict[Key, tuple[int, int]]
    host_ns: np.ndarray


@dataclass(frozen=True, eq=False)
class Compared:
    """Times in ns by rank and step, float64, shape (ranks, steps).

    Attributes:
        numbers: the steps that all ranks have.
        total: duration.
        waiting: waiting for later ranks, where no work hides it.
        transfer: other communication that no work hides.
        communication: time with a collective running.
        slices: slice to its time; with `waiting` and `transfer` they add up to `total`. Time in
            collectives for which a slow host would leave its GPU idle is part of the idle slices.
        collectives: number of collectives found.
        unmatched: the part of them that could not be matched over ranks; counted as transfer.
    """

    numbers: tuple[int, ...]
    total: np.ndarray
    waiting: np.ndarray
    transfer: np.ndarray
    communication: np.ndarray
    slices: dict[str, np.ndarray]
    collectives: int
    unmatched: int

    @property
    def own(self) -> np.ndarray:
        """Own work of each rank: step time without waiting."""
        return self.total - self.waiting


def steps_of(trace: Trace) -> RankSteps:
    """The steps of one rank, with its collectives.

    Args:
        trace: the trace of that rank.
    """
    ledger = build_ledger(trace)
    time = Spans(
        np.array([step.start_ns for step in ledger.steps], np.int64),
        np.array([step.end_ns for step in ledger.steps], np.int64),
    )
    numbers = tuple(step.index for step in ledger.steps)
    rows = _collectives(trace, ledger)
    slices = _slices(trace, ledger)
    collectives = _keyed(trace, rows, numbers, time)
    hiding = [spans for name, spans in slices.items() if name not in (*IDLE, "gpu_communication")]
    if ledger.kind == "gpu":  # the GPU's idle time hides nothing
        hiding = [slices[name] for name in ("gpu_kernel", "gpu_memcpy", "gpu_memset")]
    exposed = subtract(_running(collectives), joined(*hiding))
    return RankSteps(
        kind="watch" if len(recorded_parts(trace)) else ledger.kind,
        marked=ledger.marked,
        numbers=numbers,
        time=time,
        slices={name: subtract(spans, exposed) for name, spans in slices.items()},
        exposed=exposed,
        collectives=collectives,
        host_ns=_host_ns(trace, ledger),
    )


def _host_ns(trace: Trace, ledger: Ledger) -> np.ndarray:
    """Time of each step's mark on the host, without blocked CUDA calls, in ns, shape (steps,)."""
    if ledger.kind != "gpu" or not ledger.marked:
        return np.zeros(len(ledger.steps))
    start, end = trace.events.start_ns[ledger.marks], trace.events.end_ns[ledger.marks]
    return (end - start - covered_ns(_blocked(trace), start, end)).astype(np.float64)


def _blocked(trace: Trace) -> Spans:
    """Time in which a CUDA call waits for the GPU or for room in a queue."""
    events, rows = trace.events, trace.events.of(*CALLS)
    took = events.end_ns[rows] - events.start_ns[rows]
    usual = np.zeros(len(rows), np.int64)
    waits = np.isin(rows, by_name(trace, CALLS, SYNCHRONISES))
    for name in np.unique(events.name[rows[~waits]]):
        mine = ~waits & (events.name[rows] == name)
        usual[mine] = min(int(np.quantile(took[mine], 0.25)), LAUNCH_NS)
    blocked = waits | (took > 2 * LAUNCH_NS)
    return union((events.start_ns[rows] + usual)[blocked], events.end_ns[rows][blocked])


def _collectives(trace: Trace, ledger: Ledger) -> np.ndarray:
    """Rows of the collectives: kernels in a GPU trace, host ranges in a CPU trace."""
    if ledger.kind == "cpu":
        return by_name(trace, (Category.ANNOTATION, Category.CPU_OP), ON_HOST)
    rows = gpu_rows(trace, ledger.device)
    rows = rows[trace.events.category[rows] == Category.KERNEL]
    used = np.unique(trace.events.name[rows])
    names = [name for name in used.tolist() if communicates(trace.names[name])]
    return rows[np.isin(trace.events.name[rows], names)]


def _slices(trace: Trace, ledger: Ledger) -> dict[str, Spans]:
    owned = ledger.owned
    found = {}
    for place, name in enumerate(ledger.names):
        mine = owned.slice == place
        found[name] = Spans(owned.start_ns[mine], owned.end_ns[mine])
    if ledger.kind == "gpu":
        found |= gpu_classes(trace, gpu_rows(trace, ledger.device))
    return found


def _keyed(
    trace: Trace, rows: np.ndarray, numbers: tuple[int, ...], time: Spans
) -> dict[Key, tuple[int, int]]:
    """Start and end of each collective that starts in a step."""
    events = trace.events
    step = np.searchsorted(time.start, events.start_ns[rows], side="right") - 1
    found, seen = {}, Counter[tuple[int, str]]()
    for row, place in zip(rows.tolist(), step.tolist(), strict=True):
        start, end = int(events.start_ns[row]), int(events.end_ns[row])
        if place < 0 or start >= time.end[place]:
            continue
        kind = (numbers[place], _kind(trace, row))
        found[(*kind, seen[kind])] = (start, end)
        seen[kind] += 1
    return found


def _kind(trace: Trace, row: int) -> str:
    """Name and process group of a collective, as far as the trace records them.

    The kernel name is only a fallback, because ranks may run different kernels for the same
    collective.
    """
    index = int(trace.events.details[row])
    details = trace.details[index] if index >= 0 else {}
    name = details.get("Collective name") or trace.name_of(row)
    group = (details.get("Process Group Name", ""), details.get("Process Group Ranks", ""))
    return f"{name} {group[0]} {group[1]}"


def compare(ranks: Sequence[RankSteps], waits: Sequence[str] = ()) -> Compared:
    """Split the steps that all ranks have into slices, transfer and waiting.

    Args:
        ranks: two or more, of one kind.
        waits: for traces of a watch: slices in which time beyond the fastest rank's counts as
            waiting.
    """
    numbers = tuple(sorted(set.intersection(*(set(rank.numbers) for rank in ranks))))
    by_number = [{n: place for place, n in enumerate(rank.numbers)} for rank in ranks]
    places = [np.array([of[n] for n in numbers], np.int64) for of in by_number]
    moving, unmatched = _transfers(ranks, set(numbers))

    def measure(spans: Sequence[Spans]) -> np.ndarray:
        return np.array(
            [
                covered_ns(each, rank.time.start[place], rank.time.end[place])
                for each, rank, place in zip(spans, ranks, places, strict=True)
            ],
            np.float64,
        )

    exposed = measure([rank.exposed for rank in ranks])
    transfer = measure([intersect(r.exposed, m) for r, m in zip(ranks, moving, strict=True)])
    slices = {name: measure([rank.slices[name] for rank in ranks]) for name in ranks[0].slices}
    waiting = exposed - transfer
    total = measure([rank.time for rank in ranks])
    host = np.array([rank.host_ns[place] for rank, place in zip(ranks, places, strict=True)])
    idle = waiting - np.minimum(waiting, np.maximum(total - host, 0.0))
    if idle.any():
        waiting = waiting - idle
        slices = _with_idle(slices, idle)
    for name in waits:
        fastest = slices[name].min(axis=0)
        waiting = waiting + slices[name] - fastest
        slices[name] = np.broadcast_to(fastest, waiting.shape)
    return Compared(
        numbers=numbers,
        total=total,
        waiting=waiting,
        transfer=transfer,
        communication=measure([_running(rank.collectives) for rank in ranks]),
        slices=slices,
        collectives=sum(key[0] in numbers for rank in ranks for key in rank.collectives),
        unmatched=unmatched,
    )


def _with_idle(slices: dict[str, np.ndarray], idle: np.ndarray) -> dict[str, np.ndarray]:
    """Add idle time to each rank's idle slices, in proportion to their totals over all steps.

    Idle time of a rank without any in its slices counts as `unknown`.
    """
    names = [name for name in slices if name.startswith("idle_") or name == "unknown"]
    totals = {name: slices[name].sum(axis=1, keepdims=True) for name in names}
    known = sum(totals.values())
    totals["unknown"] = np.where(known == 0, 1.0, totals["unknown"])
    known = np.where(known == 0, 1.0, known)
    return slices | {name: slices[name] + idle * totals[name] / known for name in names}


def _running(collectives: dict[Key, tuple[int, int]]) -> Spans:
    every = np.array(list(collectives.values()), np.int64).reshape(-1, 2)
    return union(every[:, 0], every[:, 1])


def _transfers(ranks: Sequence[RankSteps], numbers: set[int]) -> tuple[list[Spans], int]:
    """Time in which each rank's collectives move data, and the number of unmatched collectives.

    In each step, a kind of collective is matched if all ranks that run it run it equally often.
    """
    counts = [Counter(key[:2] for key in rank.collectives) for rank in ranks]
    least: dict[Key, int] = {}
    matched: dict[tuple[int, str], set[int]] = defaultdict(set)
    for rank, count in zip(ranks, counts, strict=True):
        for kind, number in count.items():
            matched[kind].add(number)
        for key, (start, end) in rank.collectives.items():
            least[key] = min(least.get(key, end - start), end - start)
    moving, unmatched = [], 0
    for rank in ranks:
        start, end = [], []
        for key, span in rank.collectives.items():
            together = len(matched[key[:2]]) == 1
            unmatched += key[0] in numbers and not together
            start.append(span[1] - least[key] if together else span[0])
            end.append(span[1])
        moving.append(union(np.array(start, np.int64), np.array(end, np.int64)))
    return moving, unmatched
