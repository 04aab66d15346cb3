"""Options timed one block at a time, in random order, while every other process waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
from rival_arms import OURS, Arm
from rival_results import scatters

from steadytorch.bench.series import Series
from steadytorch.measure.correlation import effective_size
from steadytorch.measure.measurement import P99_NEEDS
from steadytorch.measure.race import LOOKS
from steadytorch.process.worker import WorkerFault

NEAR = 1.5
"""Rivals within this factor of ours are timed as often as ours, others just often enough."""
BLOCK_NS = 10e6
"""Least time of a block."""
ENOUGH, MOST = 1500, 4000
"""Samples to take for p99 where that can be afforded, and at the most."""
ALONE_S, LEAST_ALONE = 1.0, 20
"""Of each option that is timed by itself, per metric: seconds, or the time of so many calls."""
EXPLAINED_S = 3.0
"""Of ours where it scatters: `explain` asks for ten different readings of the clock in a row before
it says what follows it, and the clock is read every 45 ms or more rarely."""
BLOCK_S = 120.0


def time_all(arms: Sequence[Arm], metrics: Sequence[str], seconds: float, rng: Random) -> None:
    """Fills the arms' blocks: paired rounds within half of the time, then samples for p99.

    Where the other half is too short for the p99 of any, it goes to further rounds.

    Args:
        arms: those that failed are passed by, and one that fails meanwhile is out from there on.
        metrics: the first is the one whose p99 is asked for.
        seconds: for all of it; the fewest rounds that support a verdict are taken in any case.
        rng: decides the order within each round.
    """
    for arm in arms:
        if arm.is_live:
            arm.typical_ns = float(np.median(_block(arm, metrics[0], 3) or [np.inf]))
    live = [arm for arm in arms if arm.is_live]
    base_ns = min((arm.typical_ns for arm in live if arm.option == OURS), default=0.0)
    base_ns = base_ns or min((arm.typical_ns for arm in live), default=0.0)
    near = [arm for arm in live if arm.typical_ns <= NEAR * base_ns]
    rounds_s = seconds / 2 if affordable(near, metrics[0], seconds / 2) else seconds
    start = time.monotonic()
    for number in range(LOOKS[-1]):
        if number >= LOOKS[0] and time.monotonic() - start > rounds_s:
            break
        taking_part = live if number < LOOKS[0] else near
        for metric in metrics if number < LOOKS[0] or number % 2 == 0 else metrics[:1]:
            _round(taking_part, metric, base_ns, rng)
    left_s = max(seconds - (time.monotonic() - start), seconds / 2)
    _top_up(affordable(near, metrics[0], left_s), metrics[0], base_ns, rng, left_s)


def time_alone(
    arms: Sequence[Arm], chosen: Sequence[str], metrics: Sequence[str], rng: Random
) -> None:
    """Times some options once more, one after the other and without changing between them.

    A process that shares the host with a dozen others finds its caches taken at each turn, which
    compares options fairly, and is not how one of them is served. The others end first.

    Args:
        arms: all of them.
        chosen: which options to time.
        metrics: of what.
        rng: decides who is first.
    """
    for arm in arms:
        if arm.option not in chosen:
            arm.worker.kill()
    for arm in rng.sample(arms, len(arms)):
        for metric in metrics if arm.option in chosen and arm.is_live else ():
            asked = arm.option == OURS and metric == metrics[0] and scatters(arm.samples(metric))
            least = EXPLAINED_S if asked else ALONE_S
            seconds = max(least, 1e-9 * LEAST_ALONE * arm.typical_ns)
            found = _asked(arm, "series", metric=metric, seconds=seconds, whole=True)
            if found is None:
                break
            series = msgspec.convert(found, Series)
            if series.failed is not None:
                arm.reject(f"while it was timed: {series.failed}")
                break
            arm.alone[metric] = series


def clocks(arm: Arm) -> list[float]:
    """MHz over each of an arm's periods in turns, NaN where unknown; empty where it has failed."""
    found = _asked(arm, "clocks") if arm.is_live else None
    return [] if found is None else found[len(found) - len(arm.samples("period")) :]


def block_count(typical_ns: float, base_ns: float) -> int:
    """Iterations of one block: at least `BLOCK_NS` of them, 5 to 10 of near arms, 3 of others."""
    least = int(np.ceil(BLOCK_NS / max(typical_ns, 1.0)))
    if typical_ns > NEAR * base_ns:
        return max(3, least)
    return max(least, int(np.clip(50e6 / max(typical_ns, 1.0), 5, 10)))


def affordable(arms: Sequence[Arm], metric: str, seconds: float) -> list[Arm]:
    """Ours, then the fastest, as long as the samples they lack for p99 fit into the time."""
    chosen: list[Arm] = []
    for arm in sorted(arms, key=lambda arm: (arm.option != OURS, arm.typical_ns)):
        lacking = max(0, ENOUGH - len(arm.samples(metric)))
        seconds -= 1.3e-9 * lacking * arm.typical_ns  # what is discarded at each switch included
        if seconds < 0:
            break
        chosen.append(arm)
    return chosen


def _top_up(arms: list[Arm], metric: str, base_ns: float, rng: Random, seconds: float) -> None:
    """More rounds among arms until each has samples enough for its p99."""
    end = time.monotonic() + 1.5 * seconds
    while (arms := [arm for arm in arms if lacks(arm, metric)]) and time.monotonic() < end:
        _round(arms, metric, base_ns, rng)


def lacks(arm: Arm, metric: str) -> bool:
    """Whether more samples are wanted before something is said of its p99."""
    samples = arm.samples(metric)
    if not arm.is_live or len(samples) >= MOST:
        return False
    return len(samples) < ENOUGH or effective_size(np.asarray(samples), 0.99) < P99_NEEDS


def _round(arms: Sequence[Arm], metric: str, base_ns: float, rng: Random) -> None:
    for arm in rng.sample(arms, len(arms)):
        if not arm.is_live:
            continue
        began = time.perf_counter_ns()
        block = _block(arm, metric, block_count(arm.typical_ns, base_ns))
        if block is not None:
            arm.blocks.setdefault(metric, []).append(block)
            if metric == "period":
                arm.spans.append((began, time.perf_counter_ns()))


def _block(arm: Arm, metric: str, count: int) -> list[int] | None:
    return _asked(arm, "block", metric=metric, count=count)


def _asked(arm: Arm, method: str, **arguments: Any) -> Any:
    """The answer of an arm's process; None, and it is out, where there is none."""
    try:
        return arm.worker.call(method, BLOCK_S, **arguments)
    except WorkerFault as fault:
        arm.reject(f"while it was timed: {fault.reason}", fault.detail)
        return None
