"""Find kernels that run at varying speed on the same shapes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, SHAPES, busy_ns, gpu_launches
from steadytorch.findings.host_calls import steps_of
from steadytorch.rates.launches import Launches
from steadytorch.traces.events import Category
from steadytorch.traces.kernel_names import communicates, short

NAME = "slow-kernels"
SLOW = 0.7
"""Maximum ratio of a kernel's best time to its time for it to be slow. Of 5,900 repeats in two
published traces of quiet training (samples of Kineto and of HolisticTraceAnalysis, V100) none
was below 0.80."""
LEAST_NS = 10_000
"""Minimum best time of a kernel. Older traces round to 1 us, and shorter kernels depend on the
cache."""
LEAST_SHARE = 0.02
"""Minimum share of the GPU's work lost in slow kernels."""
FEWEST = 3
"""Minimum runs of a kernel for a comparison; also minimum steps where shapes are unknown."""


class _Slow(NamedTuple):
    """Slow runs of one kernel: their number, excess over the kernel's best time, and best time."""

    name: str
    number: int
    excess_ns: int
    best_ns: int


def rule(case: Case) -> Verdict:
    """Report kernels slower than their own best; kernels that overlap another event are excluded.

    A kernel's best time is the time of its fastest run or, with ten or more runs, the 10th
    percentile. Source for comparing a kernel with itself: HolisticTraceAnalysis, "Kernel breakdown"
    (variation of a kernel's time).
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    told = _kinds(seen)
    if told is None:
        why = "launches cannot be matched: no shapes, and no three steps with the same kernels"
        return Abstention(NAME, why, f"{SHAPES}, or profile at least three steps")
    kind, confidence = told
    kind[~(_alone(seen) & seen.of(Category.KERNEL)) | seen.named(communicates)] = -1
    best = _best(kind, seen.length_ns)
    slow = (kind >= 0) & (best >= LEAST_NS) & (best < SLOW * seen.length_ns)
    excess = np.where(slow, seen.length_ns - best, 0)
    cost = int(excess.sum()) // seen.steps
    share = cost / busy_ns(seen.ledger)
    if share <= LEAST_SHARE:
        return ()
    places = steps_of(seen.ledger, seen.start_ns[slow])
    kernels = case.variance.kernels if case.variance else None
    hit = len(np.unique(places[places >= 0]))
    return (
        Finding(
            id=NAME,
            source="hardware contention",
            title=f"slow kernels: {many(int(slow.sum()), 'run')} took up to "
            f"{float((seen.length_ns[slow] / best[slow]).max()):.1f} times the kernel's best "
            f"time; {percent(share)} of GPU work lost",
            evidence=(
                *(
                    f"{short(one.name)}: {many(one.number, 'slow run')}, "
                    f"{duration(one.excess_ns)} lost over all steps, best time "
                    f"{duration(one.best_ns)}"
                    for one in _worst(seen, slow, excess, best)
                ),
                f"in {hit} of {seen.steps} steps",
            ),
            slices=("gpu_kernel",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=kernels.same_kernels_slower if kernels else None,
            confidence=confidence,
            fix="Check the findings on clocks and on other processes. Give the workload a GPU of "
            "its own, and cool it.",
            check=CHECK,
            false_alarm="the kernel's work depends on values (sorting, sparse or masked "
            "operators), or its best run found its data in cache.",
        ),
    )


def _kinds(seen: Launches) -> tuple[np.ndarray, str] | None:
    """Group comparable launches by number, -1 if unknown; also return the confidence.

    Launches at the same position in steps of identical kernels match best: shapes, values and cache
    content agree. The fallback compares launches of the same kernel on the same shapes. The result
    is None if launches cannot be matched either way.
    """
    events = seen.trace.events
    alike, confidence = _positions(seen), "medium"
    if alike is None:
        alike = np.where(seen.operator >= 0, events.inputs[seen.operator], -1)
        confidence = "low"
    if not (alike >= 0).any():
        return None
    columns = np.stack([events.name[seen.rows], events.details[seen.rows], alike])
    kind = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)
    return np.where(alike >= 0, kind, -1), confidence


def _positions(seen: Launches) -> np.ndarray | None:
    """Position of each event in its step; None unless all steps run the same events in order."""
    places = steps_of(seen.ledger, seen.start_ns)
    counts = np.bincount(places[places >= 0], minlength=seen.steps)
    if seen.steps < FEWEST or len(set(counts.tolist())) != 1 or not counts[0]:
        return None
    names = seen.trace.events.name[seen.rows]
    position = np.full(len(places), -1, dtype=np.int64)
    for step in range(seen.steps):
        mine = np.flatnonzero(places == step)
        position[mine] = np.arange(len(mine))
        if (names[mine] != names[places == 0]).any():
            return None
    return position


def _alone(seen: Launches) -> np.ndarray:
    """Mask of the events that overlap no other event on this GPU."""
    reach = np.maximum.accumulate(seen.end_ns) if len(seen.rows) else seen.end_ns
    before = np.concatenate([[np.iinfo(np.int64).min], reach[:-1]]) <= seen.start_ns
    after = np.concatenate([seen.start_ns[1:], [np.iinfo(np.int64).max]]) >= seen.end_ns
    return before & after


def _best(kind: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Best time among the launches comparable with each launch, in ns; 0 if too few."""
    best = np.zeros(len(kind), dtype=np.int64)
    known = np.flatnonzero(kind >= 0)
    if not len(known):
        return best
    order = known[np.lexsort((length[known], kind[known]))]
    first = np.flatnonzero(np.diff(kind[order], prepend=-1))
    count = np.diff(first, append=len(order))
    fastest = length[order[first + count // 10]]
    best[order] = np.repeat(np.where(count >= FEWEST, fastest, 0), count)
    return best


def _worst(
    seen: Launches, slow: np.ndarray, excess: np.ndarray, best: np.ndarray, most: int = 3
) -> list[_Slow]:
    names = seen.trace.events.name[seen.rows]
    found = []
    for index in np.unique(names[slow]):
        mine = slow & (names == index)
        name, lost = seen.trace.names[index], int(excess[mine].sum())
        found.append(_Slow(name, int(mine.sum()), lost, int(np.median(best[mine]))))
    return sorted(found, key=lambda one: -one.excess_ns)[:most]
