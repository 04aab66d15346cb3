"""Ours and the best rivals once more in fresh processes: two processes may differ by luck alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

import msgspec
from rival_arms import OURS, Arm
from rival_results import Row, best_of, is_wrong, verdict
from rival_timing import time_all

from steadytorch.measure.race import machine_claim
from steadytorch.process.worker import WorkerFault

CLOSE = 1.1
"""Rivals within this factor of the best are set up again: any of them may be the best."""


def close(rows: Sequence[Row]) -> list[str]:
    """The rivals that may be the best by either figure, by name; none where none was timed."""
    timed = [row for row in rows if row["option"] != OURS and not row["failed"]]
    found = [
        row["option"]
        for figure in ("period_ms", "latency_ms")
        if (best := best_of(rows, figure)) is not None
        for row in timed
        if not is_wrong(row) and row[figure] <= CLOSE * best[figure]
    ]
    return [*dict.fromkeys(found)]


def anew(
    started: Callable[[], list[Arm]],
    processes: int,
    metrics: Sequence[str],
    seconds: float,
    rng: Random,
    tell: Callable[[str], None],
) -> list[list[Arm]]:
    """Options set up and timed in so many sets of fresh processes, one set after the other.

    A set that cannot be set up is left out.

    Args:
        started: sets up each option in a process of its own.
        processes: how many sets.
        metrics: what to time.
        seconds: for timing one set.
        rng: decides the order of blocks.
        tell: is told what was left out.
    """
    sets: list[list[Arm]] = []
    for number in range(processes):
        try:
            arms = started()
        except WorkerFault as fault:
            tell(f"set {number + 1} of {processes} failed: {fault.reason}")
            continue
        sets.append(arms)
        try:
            time_all(arms, metrics, seconds, rng)
        finally:
            for arm in arms:
                arm.worker.kill()
    return sets


def over_processes(rows: Sequence[Row], sets: Sequence[Sequence[Arm]]) -> None:
    """Puts into the rows what fresh processes say, in place of the one that was timed before.

    A row of the best was chosen for its time, so that process does not count. The period is the
    median of the processes' medians, the verdict `machine_claim` over an estimate per process. What
    the first process said stays, as `first`; the medians of blocks that all rests on are kept.
    """
    found = [{arm.option: arm for arm in arms if arm.is_live and arm.blocks} for arms in sets]
    for row in rows:
        lives = [each[row["option"]] for each in found if row["option"] in each]
        if row["failed"] or not lives:
            continue
        kept = ("period_ms", "period_ci_ms", "latency_ms", "ours_against_it")
        row["first"] = {key: row[key] for key in kept if key in row}
        periods = [_typical_ms(arm, "period") for arm in lives]
        latency = "latency" if "latency" in lives[0].blocks else "period"
        row["process_period_ms"] = periods
        row["process_block_medians_ns"] = [{m: arm.medians(m) for m in arm.blocks} for arm in lives]
        row["period_ms"], row["period_ci_ms"] = median(periods), None
        row["latency_ms"] = median(_typical_ms(arm, latency) for arm in lives)
        if row["option"] != OURS:
            row["ours_against_it"] = _claims(row["option"], found) or None


def _claims(option: str, found: Sequence[dict[str, Arm]]) -> dict[str, Any]:
    both = [(each[OURS], each[option]) for each in found if OURS in each and option in each]
    metrics = both[0][1].blocks if both else ()
    return {
        metric: msgspec.to_builtins(
            machine_claim(
                [
                    verdict(theirs.medians(metric), ours.medians(metric))["estimate"]
                    for ours, theirs in both
                ]
            )
        )
        for metric in metrics
    }


def _typical_ms(arm: Arm, metric: str) -> float:
    return round(median(arm.samples(metric)) / 1e6, 6)
