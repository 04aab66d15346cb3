"""Time options one block at a time in random order, while all other processes wait."""

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
"""Rivals within this factor of ours get as many samples as ours, others the minimum."""
BLOCK_NS = 10e6
"""Minimum time of a block."""
ENOUGH, MOST = 1500, 4000
"""Samples for p99: the target if time allows, and the maximum."""
ALONE_S, LEAST_ALONE = 1.0, 20
"""Limits per metric for an option timed alone: seconds, and number of calls."""
EXPLAINED_S = 3.0
"""Time for ours if its CV exceeds the limit. `explain` needs ten consecutive different readings of
the clock, which is read every 45 ms or more rarely."""
BLOCK_S = 120.0


def time_all(arms: Sequence[Arm], metrics: Sequence[str], seconds: float, rng: Random) -> None:
    """Fill the arms' blocks: paired rounds in the first half of the time, then samples for p99.

    If the second half is too short for any p99, it goes to further rounds.

    Args:
        arms: failed ones are skipped, and those that fail meanwhile drop out.
        metrics: metrics to time; p99 is for the first.
        seconds: time limit; the minimum number of rounds for a verdict is always taken.
        rng: randomises the order within each round.
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
    """Time some options again, one after the other without alternating.

    With a dozen alternating processes, each finds its caches evicted. This is a fair comparison,
    but not how one option is served. The other processes are ended first.

    Args:
        arms: all arms.
        chosen: options to time.
        metrics: metrics to time.
        rng: randomises the order.
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
    """Clock in MHz over each of an arm's periods, NaN where unknown; empty if it failed."""
    found = _asked(arm, "clocks") if arm.is_live else None
    return [] if found is None else found[len(found) - len(arm.samples("period")) :]


def block_count(typical_ns: float, base_ns: float) -> int:
    """Iterations of one block: at least `BLOCK_NS` long, 5 to 10 for near arms, 3 for others."""
    least = int(np.ceil(BLOCK_NS / max(typical_ns, 1.0)))
    if typical_ns > NEAR * base_ns:
        return max(3, least)
    return max(least, int(np.clip(50e6 / max(typical_ns, 1.0), 5, 10)))


def affordable(arms: Sequence[Arm], metric: str, seconds: float) -> list[Arm]:
    """Ours, then the fastest arms, while the samples missing for p99 fit in the time."""
    chosen: list[Arm] = []
    for arm in sorted(arms, key=lambda arm: (arm.option != OURS, arm.typical_ns)):
        lacking = max(0, ENOUGH - len(arm.samples(metric)))
        seconds -= 1.3e-9 * lacking * arm.typical_ns  # including samples discarded at each switch
        if seconds < 0:
            break
        chosen.append(arm)
    return chosen


def _top_up(arms: list[Arm], metric: str, base_ns: float, rng: Random, seconds: float) -> None:
    """Take more rounds until each arm has enough samples for its p99."""
    end = time.monotonic() + 1.5 * seconds
    while (arms := [arm for arm in arms if lacks(arm, metric)]) and time.monotonic() < end:
        _round(arms, metric, base_ns, rng)


def lacks(arm: Arm, metric: str) -> bool:
    """Whether an arm needs more samples for its p99."""
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
    """Call an arm's process; on failure, reject the arm and return None."""
    try:
        return arm.worker.call(method, BLOCK_S, **arguments)
    except WorkerFault as fault:
        arm.reject(f"while it was timed: {fault.reason}", fault.detail)
        return None
