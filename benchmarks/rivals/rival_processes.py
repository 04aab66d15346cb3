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

CLOSE = 1.1
"""Rivals within this factor of the best are set up again: any of them may be the best."""


def close(rows: Sequence[Row]) -> list[str]:
    """The rivals that may be the best, by name; none where none was timed."""
    best = best_of(rows, "period_ms")
    timed = [row for row in rows if row["option"] != OURS and not row["failed"]]
    return [
        row["option"]
        for row in timed
        if best is not None and not is_wrong(row) and row["period_ms"] <= CLOSE * best["period_ms"]
    ]


def anew(
    started: Callable[[], list[Arm]],
    processes: int,
    metrics: Sequence[str],
    seconds: float,
    rng: Random,
) -> list[list[Arm]]:
    """Options set up and timed in so many sets of fresh processes, one set after the other.

    Args:
        started: sets up each option in a process of its own.
        processes: how many sets.
        metrics: what to time.
        seconds: for timing one set.
        rng: decides the order of blocks.
    """
    sets: list[list[Arm]] = []
    for _ in range(processes):
        sets.append(started())
        try:
            time_all(sets[-1], metrics, seconds, rng)
        finally:
            for arm in sets[-1]:
                arm.worker.kill()
    return sets


def over_processes(rows: Sequence[Row], sets: Sequence[Sequence[Arm]]) -> None:
    """Puts into the rows what fresh processes say, in place of the one that was timed before.

    A row of the best was chosen for its time, so that process does not count. The period is the
    median of the processes' medians, the verdict `machine_claim` over an estimate per process; what
    the first process said stays, as `first`.
    """
    found = [{arm.option: arm for arm in arms if arm.is_live and arm.blocks} for arms in sets]
    for row in rows:
        lives = [each[row["option"]] for each in found if row["option"] in each]
        if not lives:
            continue
        kept = ("period_ms", "period_ci_ms", "latency_ms", "ours_against_it")
        row["first"] = {key: row[key] for key in kept if key in row}
        periods = [_typical_ms(arm, "period") for arm in lives]
        latency = "latency" if "latency" in lives[0].blocks else "period"
        row["process_period_ms"] = periods
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
