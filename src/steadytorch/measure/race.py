"""Comparing callables that return the time of one block: pairs, verdicts and k-way races.

Blocks of the arms are interleaved in random order, so that drift, clocks and neighbours fall on all
of them alike; looks at the data are planned, and the error is divided among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import msgspec
import numpy as np

from steadytorch.measure.statistics import hodges_lehmann, signed_rank_interval

LOOKS = (12, 18, 27, 40, 60)
"""Numbers of pairs at which a verdict may be given."""
ALPHA = 0.01
"""Probability of a false verdict over all looks together."""
TIE = 0.005
"""Differences within this fraction do not matter to anyone."""

Block = Callable[[], float]
Verdict = Literal["faster", "slower", "tie", "undecided"]


class Judgement(msgspec.Struct, frozen=True):
    """What pairs of block times say of B against A.

    Attributes:
        estimate: effect on time as a fraction; -0.12 is 12 % less time. None without pairs.
        low: lower end of its interval, None with too few pairs for one.
        high: upper end.
        verdict: faster, slower, tie or undecided, of B.
        pairs: how many pairs the verdict rests on.
        mde: the smallest effect that this many pairs would have found, as a fraction.
    """

    estimate: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    pairs: int
    mde: float | None


def judge(
    pairs: Sequence[tuple[float, float]],
    *,
    looks: Sequence[int] = LOOKS,
    alpha: float = ALPHA,
    tie: float = TIE,
) -> Judgement:
    """Applies the planned looks in sequence and stops at the first that decides.

    Args:
        pairs: (time of A's block, time of B's block) in the order taken, any one unit.
        looks: numbers of pairs at which to look.
        alpha: false-verdict probability over all looks, divided evenly among them.
        tie: half-width of the tie band as a fraction.
    """
    differences = log_ratios(pairs)
    taken = [look for look in looks if look <= len(differences)]
    for look in taken:
        judgement = _look(differences[:look], alpha / len(looks), tie)
        if judgement.verdict != "undecided":
            return judgement
    if taken:
        return _look(differences[: taken[-1]], alpha / len(looks), tie)
    # Before the first planned look nothing may be decided, whatever the interval says.
    early = _look(differences, alpha / len(looks), tie)
    return msgspec.structs.replace(early, verdict="undecided")


def log_ratios(pairs: Sequence[tuple[float, float]]) -> np.ndarray:
    """ln(B / A) of each pair, shape (n,)."""
    times = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return np.log(times[:, 1]) - np.log(times[:, 0])


def _look(differences: np.ndarray, alpha: float, tie: float) -> Judgement:
    count = len(differences)
    if count == 0:
        return Judgement(None, None, None, "undecided", 0, None)
    estimate = float(np.expm1(hodges_lehmann(differences)))
    interval = signed_rank_interval(differences, alpha)
    if interval is None:
        return Judgement(estimate, None, None, "undecided", count, None)
    low, high = (float(np.expm1(bound)) for bound in interval)
    spread = float(np.std(differences, ddof=1))
    mde = float(np.expm1((3.09 + 1.28) * 1.02 * spread / np.sqrt(count)))
    verdict: Verdict = "undecided"
    if high < 0:
        verdict = "faster"
    elif low > 0:
        verdict = "slower"
    elif -tie <= low and high <= tie:
        verdict = "tie"
    return Judgement(estimate, low, high, verdict, count, mde)


def compare(
    a: Block,
    b: Block,
    *,
    rng: Random,
    looks: Sequence[int] = LOOKS,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Judgement, list[tuple[float, float]]]:
    """Takes pairs, the order within each by coin, until a look decides or `stop` says so.

    Returns:
        The judgement and all pairs (A, B) in the order taken.
    """
    pairs: list[tuple[float, float]] = []
    for look in looks:
        while len(pairs) < look and not stop():
            if rng.random() < 0.5:
                time_a = a()
                pairs.append((time_a, b()))
            else:
                time_b = b()
                pairs.append((a(), time_b))
        judgement = judge(pairs, looks=looks)
        if judgement.verdict != "undecided" or len(pairs) < look:
            return judgement, pairs
    return judge(pairs, looks=looks), pairs


class RaceResult(msgspec.Struct, frozen=True):
    """The outcome of a race.

    Attributes:
        survivors: indices of the arms not shown to be slower than the leader, fastest first.
        times: per arm, its block times in the order taken; shorter for those dropped early.
        leader: index of the arm with the lowest centre.
    """

    survivors: tuple[int, ...]
    times: tuple[tuple[float, ...], ...]
    leader: int


def race(
    arms: Sequence[Block],
    *,
    rng: Random,
    looks: Sequence[int] = LOOKS,
    alpha: float = ALPHA,
    tie: float = TIE,
    stop: Callable[[], bool] = lambda: False,
) -> RaceResult:
    """Randomised complete blocks over the survivors, dropping those shown to be slower.

    An arm is dropped at a look when its exact interval against the leader, at
    alpha / ((k - 1) looks), excludes zero. The race ends when one arm is left, when all that are
    left lie within the tie band of the leader, at the last look, or when `stop` says so.

    Args:
        arms: each runs one block and returns its time.
        rng: decides the order within each round of blocks.
        looks: numbers of rounds at which arms may be dropped.
        alpha: probability of dropping the best arm, over the whole race.
        tie: half-width of the tie band as a fraction.
        stop: asked before each round; True ends the race with what there is.
    """
    times: list[list[float]] = [[] for _ in arms]
    alive = list(range(len(arms)))
    level = alpha / (max(1, len(arms) - 1) * len(looks))
    for look in looks:
        while len(times[alive[0]]) < look and not stop():
            for arm in rng.sample(alive, len(alive)):
                times[arm].append(arms[arm]())
        if not times[alive[0]]:
            break
        alive, settled = _drop_slower(times, alive, level, tie)
        if settled or len(times[alive[0]]) < look:
            break
    leader = alive[0]
    return RaceResult(tuple(alive), tuple(tuple(row) for row in times), leader)


def _drop_slower(
    times: list[list[float]], alive: list[int], level: float, tie: float
) -> tuple[list[int], bool]:
    """The survivors, fastest first, and whether nothing is left to decide among them."""
    logs = {arm: np.log(times[arm]) for arm in alive}
    ranked = sorted(alive, key=lambda arm: float(np.median(logs[arm])))
    leader, kept, settled = ranked[0], [ranked[0]], True
    for arm in ranked[1:]:
        interval = signed_rank_interval(logs[arm] - logs[leader], level)
        if interval is not None and interval[0] > 0:
            continue
        kept.append(arm)
        if interval is None or max(abs(np.expm1(bound)) for bound in interval) > tie:
            settled = False
    return kept, settled
