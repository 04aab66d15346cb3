"""Repeat ours and the best rivals in fresh processes, because processes differ by chance."""

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
"""Rivals within this factor of the best are repeated, because any of them may be the best."""


def close(rows: Sequence[Row]) -> list[str]:
    """Names of the rivals that may be the best by either figure; empty if none was timed."""
    timed = [row for row in rows if not (row["option"].startswith(OURS) or row["failed"])]
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
    """Set up and time options in several sets of fresh processes, one set after the other.

    A set whose set-up fails is left out.

    Args:
        started: sets up each option in a separate process.
        processes: number of sets.
        metrics: metrics to time.
        seconds: time limit for timing one set.
        rng: randomises the order of blocks.
        tell: called with sets that were left out.
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
    """Replace the figures of the first process in the rows by those of fresh processes.

    The best rival was chosen by its first time, so that process does not count. The period is the
    median of the processes' medians. The verdict is `machine_claim` over one estimate per process.
    The first figures are kept as `first`, and so are the block medians.
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
