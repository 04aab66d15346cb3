"""Find the rank of a job for which the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict

NAME = "late-rank"
LEAST_SHARE = 0.05
"""Minimum share of the step by which a rank is late."""
LEAST_MATCH = 0.5
"""Minimum part of the lateness that the other ranks spend in longer waits."""
LEAST_ERRORS = 4.0
"""Minimum lateness in standard errors, each from eight batches of steps. Ranks that share cores
differ by chance."""
_Times = Mapping[str, tuple[float, float]]
_OWN = ("input_wait", "collection", "copies", "optimizer", "evaluation")
"""Slices in which no rank waits for another."""
_MAY_WAIT = ("forward", "rest")
"""Slices in which a rank may wait, though most wait in `backward`."""

_NEVER = (0.0, 0.0)
_WORDS = {
    "input_wait": "waiting for data",
    "collection": "garbage collection",
    "unknown": "code without records",
}


class Late(NamedTuple):
    """A late rank: its slice and lateness, and the slice in which the other ranks wait for it."""

    rank: int
    slice: str
    by_ns: float
    waits: str
    waited_ns: float


def rule(case: Case) -> Verdict:
    """Report a rank that is slower than the others in one slice of the step and makes them wait.

    All ranks of a synchronous job have the same step time: the other ranks wait for a late rank's
    gradients, mostly in `backward`. Durations are compared slice by slice, since the clocks of
    different machines do not agree. Source: "Distributed Data Parallel", PyTorch notes, on gradient
    synchronisation; HolisticTraceAnalysis, on idle time by rank.
    """
    steps = case.watched
    if steps is None or len(steps.ranks) < 2:
        why = "one process was watched" if steps else "no script was watched"
        advice = (
            "run `torchrun --no-python steady run SCRIPT`, or pass the traces of all ranks to "
            "`steady explain`"
        )
        return Abstention(NAME, why, advice)
    found = _latest(steps.ranks)
    if found is None:
        return ()
    mine, _ = steps.ranks[found.rank][found.slice]
    return (
        finding(
            found,
            step_ns=_step_ns(steps.ranks),
            mine_ns=mine,
            usual_ns=_usual(steps.ranks, found.rank, found.slice),
            confidence="high" if found.slice in _OWN else "medium",
            look_at="its own --json file",
            check="run the job under `steady run` again",
        ),
    )


def finding(
    late: Late,
    *,
    step_ns: float,
    mine_ns: float,
    usual_ns: float,
    confidence: str,
    look_at: str,
    check: str,
    more: tuple[str, ...] = (),
    variance_share: float | None = None,
) -> Finding:
    """Builds the finding about a late rank. Times are in ns per step.

    Args:
        late: the rank.
        step_ns: duration of a step.
        mine_ns: time of the slice on this rank.
        usual_ns: its median on the other ranks.
        confidence: one of `CONFIDENCES`.
        look_at: where the times of this rank alone are.
        check: a command that shows whether the fix worked.
        more: further evidence.
        variance_share: share of this rank in the variance of the steps; None if unknown.
    """
    cost = round(late.by_ns)
    where = _WORDS.get(late.slice, late.slice)
    return Finding(
        id=NAME,
        source="synchronisation",
        title=f"rank {late.rank} is late by {duration(cost)} a step "
        f"({percent(cost / step_ns)}), in {where}",
        evidence=(
            f"{where}: {duration(mine_ns)} a step on rank {late.rank}, {duration(usual_ns)} on the "
            "others",
            f"the others spend {duration(late.waited_ns)} more in {late.waits}, where ranks "
            "wait for one another",
            *more,
        ),
        cost_ns=cost,
        recoverable_ns=(0, cost),
        variance_share=variance_share,
        confidence=confidence,
        fix=f"Look at rank {late.rank} alone ({look_at}): its data, its cores, its "
        "machine. Give all ranks equal work.",
        check=check,
        false_alarm="ranks have different work on purpose, such as stages of a pipeline.",
    )


def _latest(ranks: Mapping[int, _Times]) -> Late | None:
    """The rank and slice with the largest lateness for which the other ranks wait, or None."""
    least = LEAST_SHARE * _step_ns(ranks)
    found = []
    for own, waits in ((_OWN, ("backward", *_MAY_WAIT)), (_MAY_WAIT, ("backward",))):
        for rank, times in ranks.items():
            for name in own:
                mine, error = times.get(name, _NEVER)
                late = mine - _usual(ranks, rank, name)
                error = float(np.hypot(error, _error(ranks, rank, name)))
                where, waited = _longest_wait(ranks, rank, waits)
                if late >= max(least, LEAST_ERRORS * error) and waited >= LEAST_MATCH * late:
                    found.append(Late(rank, name, late, where, waited))
        if found:
            break
    return max(found, key=lambda each: each.by_ns, default=None)


def _step_ns(ranks: Mapping[int, _Times]) -> float:
    """Mean time of a step over all ranks, in ns."""
    return float(np.mean([sum(mean for mean, _ in times.values()) for times in ranks.values()]))


def _others(ranks: Mapping[int, _Times], rank: int, name: str) -> np.ndarray:
    """Mean time of a slice and its error on each other rank, float64, shape (other ranks, 2)."""
    found = [times.get(name, _NEVER) for other, times in ranks.items() if other != rank]
    return np.asarray(found, dtype=np.float64)


def _usual(ranks: Mapping[int, _Times], rank: int, name: str) -> float:
    """Median time of a slice on the other ranks."""
    return float(np.median(_others(ranks, rank, name)[:, 0]))


def _error(ranks: Mapping[int, _Times], rank: int, name: str) -> float:
    """Median of the other ranks' standard errors of a slice."""
    return float(np.median(_others(ranks, rank, name)[:, 1]))


def _longest_wait(
    ranks: Mapping[int, _Times], rank: int, names: tuple[str, ...]
) -> tuple[str, float]:
    """The slice in which the other ranks most exceed a rank's time, and the excess in ns."""
    beyond = {n: _usual(ranks, rank, n) - ranks[rank].get(n, _NEVER)[0] for n in names}
    name = max(beyond, key=lambda each: beyond[each])
    return name, beyond[name]
