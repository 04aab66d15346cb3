"""A against B: live, interleaved in pairs of blocks, or from two saved results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from steadytorch.device.facts import resolve_device
from steadytorch.errors import UsageError
from steadytorch.measure.race import (
    ALPHA,
    LEAST_PROCESSES,
    POWER,
    TIE,
    compare,
    judge,
    machine_claim,
    verdict_of,
)
from steadytorch.measure.statistics import detectable
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.transforms.base import Candidate
from steadytorch.trial.dwell import Dwell, dwells
from steadytorch.trial.measure import HANDLER, start
from steadytorch.trial.series import Series
from steadytorch.trial.worker import save_payload
from steadytorch.workload.workload import Workload

LONG_NS = 150e6
"""From here on a block is three iterations."""


class Side(msgspec.Struct, frozen=True):
    """One of the two that are compared.

    Attributes:
        name: what results call it.
        median_ns: its median over all pairs.
    """

    name: str
    median_ns: float


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of B on time, and what it rests on.

    Attributes:
        estimate: as a fraction; -0.12 is 12 % less time. None without data.
        low: lower end of its interval, None where none may be claimed.
        high: upper end.
        verdict: faster, slower, tie or undecided, of B.
        claim: `process` or `machine`.
        pairs: pairs of blocks it rests on; 0 for saved results.
        processes: fresh processes of each side.
        mde: the smallest effect that would have been found, as a fraction; None where unknown.
    """

    estimate: float | None
    low: float | None
    high: float | None
    verdict: str
    claim: str
    pairs: int
    processes: int
    mde: float | None

    def slower_than(self, limit: float) -> bool:
        """Whether B is slower than A by more than `limit` (a fraction), with confidence."""
        return self.low is not None and self.low > limit


class CompareResult(msgspec.Struct, frozen=True, kw_only=True):
    """What pairs, or processes, say of B against A.

    Attributes:
        a: the first.
        b: the second.
        metric: `latency` or `period`.
        effect: of B.
        note: what the reader must know, such as why nothing is claimed; else empty.
        samples: per process, the pairs (block of A, block of B) in ns.
        failed: which workload failed and why, None if none did; what was taken before is kept.
        interrupted: whether the user stopped it.
        dwells: each side by itself, where a power limit holds the clock; from the first processes.
    """

    a: Side
    b: Side
    metric: str
    effect: Effect
    note: str = ""
    samples: tuple[tuple[tuple[float, float], ...], ...] = ()
    failed: str | None = None
    interrupted: bool = False
    dwells: tuple[Dwell, ...] = ()


_T = TypeVar("_T")
Contender = tuple[Workload, Candidate, str]
"""Workload, the transforms to run it with, and its name."""


def compare_live(
    a: Contender,
    b: Contender,
    *,
    processes: int = 1,
    metric: str = "latency",
    device: str | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> CompareResult:
    """Times two workloads against one another in live workers, block by block in random order.

    Ctrl-C ends it early and keeps the pairs taken until then; before the first it is raised as
    `KeyboardInterrupt`.

    Args:
        a: the first.
        b: the second.
        processes: fresh pairs of workers; three or more support a claim for the machine.
        metric: `latency` or `period`.
        device: where to run; None for where A is.
        seed: of the order of blocks.
        progress: is told what is going on.

    Raises:
        UsageError: one of them fails before anything was timed, or an argument is wrong.
    """
    if processes < 1:
        raise UsageError(f"cannot compare in {processes} processes: give 1 or more")
    target = resolve_device(device or str(a[0].device))
    rng, done, ended = Random(seed), list[_Taken](), None
    with shared_folder() as one, shared_folder() as other:
        folders = (one, other)
        for folder, (workload, _, _) in zip(folders, (a, b), strict=True):
            save_payload(workload, folder)
        while len(done) < processes and ended is None:
            progress(f"pair of processes {len(done) + 1} of {processes}")
            taken = _one_pair(folders, (a, b), target, metric, rng, alone=not done)
            done.append(taken)
            ended = taken.ended
    if not any(taken.pairs for taken in done):
        raise UsageError(str(ended)) if isinstance(ended, _Fails) else KeyboardInterrupt
    times = np.concatenate([np.reshape(taken.pairs, (-1, 2)) for taken in done])
    return CompareResult(
        a=Side(a[2], float(np.median(times[:, 0]))),
        b=Side(b[2], float(np.median(times[:, 1]))),
        metric=metric,
        effect=_combined(done),
        note=f"stopped early: {ended}" if isinstance(ended, _Fails) else _too_few(processes),
        samples=tuple(tuple(taken.pairs) for taken in done),
        failed=str(ended) if isinstance(ended, _Fails) else None,
        interrupted=isinstance(ended, KeyboardInterrupt),
        dwells=done[0].dwells,
    )


def _too_few(processes: int) -> str:
    """Two are more than the one that speaks for itself, and fewer than speak for the machine."""
    if processes == 1 or processes >= LEAST_PROCESSES:
        return ""
    return (
        f"{processes} pairs of processes support no verdict: one speaks for these processes, "
        f"{LEAST_PROCESSES} or more for the machine"
    )


class _Fails(Exception):  # noqa: N818 - a fault of a workload, told in a sentence
    """One of the two workloads failed."""


class _Taken(NamedTuple):
    """What one pair of processes gave, and what ended it before its time."""

    pairs: list[tuple[float, float]]
    ended: _Fails | KeyboardInterrupt | None
    dwells: tuple[Dwell, ...] = ()


def _one_pair(
    folders: Sequence[Path],
    sides: Sequence[Contender],
    device: str,
    metric: str,
    rng: Random,
    alone: bool,
) -> _Taken:
    """Takes pairs until a look decides; then each side `alone`, where power holds the clock."""
    times: tuple[list[float], list[float]] = ([], [])
    workers: list[Worker] = []
    ended, found = None, ()
    try:
        workers.extend(Worker(HANDLER, folder, "side") for folder in folders)
        set_ups = [_of(sides[i], start, workers[i], device, sides[i][1]) for i in range(2)]
        longest = max(set_up.warm_up.iteration_ns for set_up in set_ups)
        count = 3 if longest >= LONG_NS else 7
        deadline_s = 60.0 + 40e-9 * count * longest

        def block(i: int) -> float:
            ask = partial(workers[i].call, metric=metric, count=count)
            times[i].append(float(np.median(_of(sides[i], ask, "block", deadline_s))))
            return times[i][-1]

        def series(i: int, seconds: float) -> Series:
            ask = partial(workers[i].call, metric=metric, seconds=seconds, whole=True)
            return msgspec.convert(_of(sides[i], ask, "series", deadline_s + seconds), Series)

        compare(partial(block, 0), partial(block, 1), rng=rng)
        if alone and device.startswith("cuda"):
            found = dwells(series, rng)
    except (_Fails, KeyboardInterrupt) as reason:
        ended = reason
    finally:
        for worker in workers:
            worker.kill()
    # Cut short within a pair, one side has a block more than the other.
    return _Taken(list(zip(*times, strict=False)), ended, found)


def _of(side: Contender, ask: Callable[..., _T], *arguments: Any) -> _T:
    """Asks a worker, and says whose it was where it fails."""
    try:
        return ask(*arguments)
    except WorkerFault as fault:
        raise _Fails(f"the workload {side[2]} fails: {fault.reason}") from fault


def _combined(done: Sequence[_Taken]) -> Effect:
    """One process speaks for itself; several are replicates of one another."""
    whole = [judge(taken.pairs) for taken in done if taken.ended is None]
    judgements = whole or [judge(taken.pairs) for taken in done]
    pairs = sum(judgement.pairs for judgement in judgements)
    if len(judgements) == 1:
        only = judgements[0]
        return Effect(
            estimate=only.estimate,
            low=only.low,
            high=only.high,
            verdict=only.verdict,
            claim="process",
            pairs=pairs,
            processes=1,
            mde=only.mde,
        )
    claim = machine_claim([j.estimate for j in judgements if j.estimate is not None])
    return Effect(
        estimate=claim.estimate,
        low=claim.low,
        high=claim.high,
        verdict=claim.verdict,
        claim=claim.claim,
        pairs=pairs,
        processes=claim.processes,
        mde=claim.mde,
    )


def compare_saved(
    a: tuple[str, Sequence[float]], b: tuple[str, Sequence[float]], metric: str = "period"
) -> CompareResult:
    """Compares two saved measurements by the medians of their processes.

    Processes are the unit of replication: with fewer than three on either side there is nothing to
    tell a difference between programs from one between processes, and no verdict is given.

    Args:
        a: name and median per process in ns.
        b: likewise.
        metric: what the medians are of.
    """
    logs = [np.log(np.asarray(medians, dtype=np.float64)) for _, medians in (a, b)]
    fewest = min(map(len, logs))
    estimate = float(np.expm1(logs[1].mean() - logs[0].mean()))
    low = high = mde = None
    note, verdict = "", "undecided"
    if fewest < LEAST_PROCESSES:
        note = (
            f"{fewest} process{'es' if fewest > 1 else ''} on one side: differences between "
            "processes cannot be told from those between programs; measure with --processes 5"
        )
    else:
        low, high = map(float, np.expm1(welch_interval(logs[0], logs[1], 1 - ALPHA)))
        _, error, freedom = _welch(logs[0], logs[1])
        mde = float(np.expm1(detectable(freedom, ALPHA, POWER) * error)) if error else 0.0
        verdict = verdict_of(low, high, TIE)
    return CompareResult(
        a=Side(a[0], float(np.median(a[1]))),
        b=Side(b[0], float(np.median(b[1]))),
        metric=metric,
        effect=Effect(
            estimate=estimate,
            low=low,
            high=high,
            verdict=verdict,
            claim="process" if low is None else "machine",
            pairs=0,
            processes=fewest,
            mde=mde,
        ),
        note=note,
    )


def welch_interval(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of mean(b) - mean(a) for groups of unequal variance (B. Welch, 1947).

    Args:
        a: shape (n,), n >= 2.
        b: shape (m,), m >= 2.
        confidence: nominal coverage.
    """
    from scipy.special import stdtrit

    difference, error, freedom = _welch(a, b)
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * error if error else 0.0
    return difference - half, difference + half


def _welch(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """mean(b) - mean(a), its standard error, and the degrees of freedom of that."""
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    parts = errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1)
    freedom = sum(errors) ** 2 / parts if parts else float(len(a) + len(b) - 2)
    return float(b.mean() - a.mean()), sum(errors) ** 0.5, freedom
