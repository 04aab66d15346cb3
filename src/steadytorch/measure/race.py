"""Compares callables that each return the time of one block: A/B pairs and k-way races.

Blocks of the compared callables (arms) are interleaved in random order, so that drift, clocks and
neighbour processes affect all arms alike. Interim looks at the data are planned in advance, and the
error probability is divided among the looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import msgspec
import numpy as np

from steadytorch.errors import UsageError
from steadytorch.measure.statistics import (
    detectable,
    hodges_lehmann,
    minimal_pairs,
    signed_rank_cut,
    signed_rank_interval,
    walsh_averages,
)

LOOKS = (12, 18, 27, 40, 60)
"""Numbers of pairs at which a verdict is possible."""
ALPHA = 0.01
"""Probability of a false verdict over all looks."""
TIE = 0.005
"""Differences within this fraction count as a tie."""
POWER = 0.90
"""Probability of finding the minimal detectable effect. For pairs it holds from 27 pairs on; at 12
it is 0.81, because so few ranks cannot use the whole level."""
LEAST_PROCESSES = 3
"""Minimum number of fresh processes for a claim about the machine; five are better."""

Block = Callable[[], float]
Verdict = Literal["faster", "slower", "tie", "undecided"]


class Judgement(msgspec.Struct, frozen=True):
    """The comparison of B with A from pairs of block times.

    Attributes:
        estimate: effect on time as a fraction; -0.12 is 12 % less time. None without pairs.
        low: lower end of its interval; None with too few pairs.
        high: upper end.
        verdict: whether B is faster, slower, tie or undecided.
        pairs: number of pairs behind the verdict.
        mde: minimal detectable effect at this number of pairs, as a fraction.
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
    """Evaluate the pairs at each planned look; stop at the first look with a verdict.

    Args:
        pairs: (time of A's block, time of B's block) in the order taken, in any one unit.
        looks: numbers of pairs at which to look, ascending; pairs between two looks are not used.
        alpha: false-verdict probability over all looks, divided evenly among them.
        tie: half-width of the tie band as a fraction.

    Raises:
        UsageError: the input is not pairs, or a time is not a positive finite number.
    """
    differences = _checked_ratios(pairs)
    taken = [look for look in looks if look <= len(differences)]
    for look in taken:
        judgement = _look(differences[:look], alpha / len(looks), tie)
        if judgement.verdict != "undecided":
            return judgement
    if taken:
        return _look(differences[: taken[-1]], alpha / len(looks), tie)
    # A verdict before the first planned look would exceed the error probability.
    early = _look(differences, alpha / len(looks), tie)
    return msgspec.structs.replace(early, verdict="undecided")


def _checked_ratios(pairs: Sequence[tuple[float, float]]) -> np.ndarray:
    """Validate pairs from the caller and return their `log_ratios`."""
    try:
        times = np.asarray(pairs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"judge needs pairs (time of A, time of B): {error}") from error
    if times.size and (times.ndim != 2 or times.shape[1] != 2):
        raise UsageError(f"judge needs pairs (time of A, time of B), not shape {times.shape}")
    times = times.reshape(-1, 2)
    wrong = np.flatnonzero(~(np.isfinite(times) & (times > 0)).all(axis=1))
    if len(wrong):
        at = int(wrong[0])
        raise UsageError(
            f"pair {at} is {tuple(times[at].tolist())}: times must be positive finite numbers"
        )
    return log_ratios(pairs)


def log_ratios(pairs: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return ln(B / A) of each pair, shape (n,)."""
    times = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return np.log(times[:, 1]) - np.log(times[:, 0])


def _look(differences: np.ndarray, alpha: float, tie: float) -> Judgement:
    count = len(differences)
    if count == 0:
        return Judgement(None, None, None, "undecided", 0, None)
    averages = walsh_averages(differences)
    estimate = float(np.expm1(np.median(averages)))
    cut = signed_rank_cut(count, alpha)
    if cut is None:
        return Judgement(estimate, None, None, "undecided", count, None)
    low, high = (float(np.expm1(averages[end])) for end in (cut, -1 - cut))
    # On normal differences, the signed-rank test has 1.02 times the standard error of the t-test.
    error = 1.02 * float(np.std(differences, ddof=1)) / np.sqrt(count)
    mde = float(np.expm1(detectable(count - 1, alpha, POWER) * error))
    return Judgement(estimate, low, high, verdict_of(low, high, tie), count, mde)


def verdict_of(low: float, high: float, tie: float) -> Verdict:
    """Return the verdict for an effect's interval and a tie band's half-width, all fractions."""
    if high < 0:
        return "faster"
    if low > 0:
        return "slower"
    return "tie" if -tie <= low and high <= tie else "undecided"


def compare(
    a: Block,
    b: Block,
    *,
    rng: Random,
    looks: Sequence[int] = LOOKS,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Judgement, list[tuple[float, float]]]:
    """Measure pairs, each in random order, until a look has a verdict or `stop` returns True.

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
        times: block times of each arm, in the order taken; fewer for arms dropped early.
        leader: index of the arm with the lowest median.
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
    loss: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> RaceResult:
    """Race callables (arms) in randomised complete blocks; drop arms shown to be slower.

    A look drops an arm if its exact interval against the leader, at level alpha / ((k - 1) looks)
    for k arms, lies above zero. A look with too few rounds for an exact interval is postponed to
    the first round that allows one. The race ends when one arm is left, when all remaining arms are
    within `tie` of the leader's time, or after the last number of rounds in `looks`. The race also
    ends when the leader is good enough (`loss`) or `stop` returns True.

    Args:
        arms: each runs one block and returns its time.
        rng: draws the order within each round of blocks.
        looks: numbers of rounds at which arms may be dropped.
        alpha: probability of dropping the best arm, over the whole race.
        tie: half-width of the tie band as a fraction.
        loss: the race ends at a look if choosing the leader is then expected to cost less than
            this, as a fraction of its time.
        stop: called before each round; True ends the race with the times so far.
    """
    times: list[list[float]] = [[] for _ in arms]
    alive = list(range(len(arms)))
    level = alpha / (max(1, len(arms) - 1) * len(looks))
    for look in sorted({max(look, minimal_pairs(level)) for look in looks}):
        while len(times[alive[0]]) < look and not stop():
            for arm in rng.sample(alive, len(alive)):
                times[arm].append(arms[arm]())
        if not times[alive[0]]:
            break
        alive, settled = _drop_slower(times, alive, level, tie)
        if settled or len(times[alive[0]]) < look or _expected_loss(times, alive) < loss:
            break
    leader = alive[0]
    return RaceResult(tuple(alive), tuple(tuple(row) for row in times), leader)


def _drop_slower(
    times: list[list[float]], alive: list[int], level: float, tie: float
) -> tuple[list[int], bool]:
    """Return the arms that remain, fastest first, and whether all of them tie with the leader."""
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


def _expected_loss(times: list[list[float]], alive: list[int]) -> float:
    """Upper bound of the expected excess time of the first arm over the fastest, as a fraction.

    The bound sums E[max(0, ln(time of the first arm / time of the other arm))] over all other arms,
    with normal errors. The bound is inf if an arm died.
    """
    from scipy.special import ndtr

    logs, total = {arm: np.log(times[arm]) for arm in alive}, 0.0
    if not all(np.isfinite(each).all() for each in logs.values()):
        return float("inf")
    for rival in alive[1:]:
        lead = logs[rival] - logs[alive[0]]
        ahead, error = hodges_lehmann(lead), 1.02 * np.std(lead, ddof=1) / np.sqrt(len(lead))
        if error:
            density = np.exp(-((ahead / error) ** 2) / 2) / np.sqrt(2 * np.pi)
            total += error * density - ahead * ndtr(-ahead / error)
        else:
            total += max(0.0, -ahead)
    return float(total)


class MachineClaim(msgspec.Struct, frozen=True):
    """The comparison of B with A over fresh processes.

    Attributes:
        estimate: effect on time as a fraction, the geometric mean over processes.
        low: lower end of its interval; None with fewer than three processes.
        high: upper end.
        verdict: whether B is faster, slower, tie or undecided.
        processes: number of processes.
        claim: `machine` from three processes on, else `process`.
        mde: minimal detectable effect at this number of processes, as a fraction; None with fewer
            than three.
    """

    estimate: float
    low: float | None
    high: float | None
    verdict: Verdict
    processes: int
    claim: Literal["process", "machine"]
    mde: float | None = None


def machine_claim(
    estimates: Sequence[float], *, alpha: float = ALPHA, tie: float = TIE
) -> MachineClaim:
    """Combine the effects of B over A from several fresh processes, each with its own workers.

    Processes differ by more than the noise within one process: memory layout, clocks, chosen
    algorithms. The interval is therefore Student's, with one log effect per process, regardless of
    the number of samples in each process.

    Args:
        estimates: effect on time in each process as a fraction, as in `Judgement.estimate`.
        alpha: probability that the interval misses the effect.
        tie: half-width of the tie band as a fraction.

    Raises:
        UsageError: there is no estimate, or one is not a finite fraction above -1.
    """
    effects = np.asarray(estimates, dtype=np.float64)
    if effects.ndim != 1 or len(effects) == 0:
        raise UsageError("machine_claim needs the estimate of at least one process")
    wrong = np.flatnonzero(~(np.isfinite(effects) & (effects > -1)))
    if len(wrong):
        at = int(wrong[0])
        raise UsageError(
            f"the estimate of process {at} is {effects[at]}: effects are fractions above -1, "
            "such as -0.12 for 12 % less time"
        )
    logs, count = np.log1p(effects), len(effects)
    estimate = float(np.expm1(logs.mean()))
    if count < LEAST_PROCESSES:
        return MachineClaim(estimate, None, None, "undecided", count, "process")
    from scipy.special import stdtrit

    error = float(logs.std(ddof=1)) / np.sqrt(count)
    quantile = float(stdtrit(count - 1, 1 - alpha / 2))
    low, high = (float(np.expm1(logs.mean() + side * quantile * error)) for side in (-1, 1))
    mde = float(np.expm1(detectable(count - 1, alpha, POWER) * error))
    verdict = verdict_of(low, high, tie)
    return MachineClaim(estimate, low, high, verdict, count, "machine", mde)
