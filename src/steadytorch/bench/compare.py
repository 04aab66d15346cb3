"""Compares workloads A and B live in interleaved pairs of blocks; for saved results see `saved`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from steadytorch.bench.bench_worker import save_payload
from steadytorch.bench.measure import HANDLER, start
from steadytorch.bench.saved import compare_files
from steadytorch.bench.series import Series
from steadytorch.bench.sustained_runs import run_sustained
from steadytorch.device.facts import resolve_device
from steadytorch.errors import UsageError
from steadytorch.measure.race import LEAST_PROCESSES, LOOKS, judge, machine_claim
from steadytorch.measure.race import compare as race_pairs
from steadytorch.process.folder import shared_folder
from steadytorch.process.worker import Worker, WorkerFault
from steadytorch.quantities import parse_duration
from steadytorch.results.candidate import Candidate
from steadytorch.results.compare import CompareResult, Effect, Side, SustainedRun
from steadytorch.workload.given import workload_of
from steadytorch.workload.workload import Workload

METRICS = ("latency", "period")
LONG_NS = 150e6
"""Iteration time in ns from which on a block has three iterations instead of seven."""
BUDGET = "5m"
"""Default time for a comparison."""


_T = TypeVar("_T")
Contender = tuple[Workload, Candidate, str]
"""A workload, the transforms to run it with, and its name."""


def compare(
    a: Workload | tuple[Any, Any] | str | Path,
    b: Workload | tuple[Any, Any] | str | Path,
    *,
    candidates: tuple[Candidate, Candidate] = ((), ()),
    processes: int = 1,
    metric: str = "latency",
    device: str | None = None,
    seed: int = 0,
    budget: str | float = BUDGET,
    progress: Callable[[str], None] = lambda message: None,
) -> CompareResult:
    """Compares two workloads, or two results saved by `steady measure --json`.

    Workloads are timed live; see `compare_live`. Saved results are compared by the medians of their
    processes, and all other arguments must keep their defaults.

    Args:
        a: a workload, its `(model, inputs)`, or the path of a saved result.
        b: the same kind as `a`; the verdict is about `b`.
        candidates: transforms to run each workload with; empty for untouched.
        processes: fresh pairs of processes; three or more support a claim for the machine.
        metric: `latency` or `period`.
        device: where to run; None for A's device.
        seed: seed of the block order.
        budget: time for the comparison, such as `5m`; see `compare_live`.
        progress: called with progress messages.

    Raises:
        UsageError: only one of `a` and `b` is saved, a workload fails before anything was timed, a
            file holds no measurement, the files come from different machines, or an argument is
            wrong.
    """
    if not isinstance(a, str | Path) and not isinstance(b, str | Path):
        one, other = workload_of(a), workload_of(b)
        return compare_live(
            (one, candidates[0], one.name),
            (other, candidates[1], other.name),
            processes=processes,
            metric=metric,
            device=device,
            seed=seed,
            budget=budget,
            progress=progress,
        )
    if not isinstance(a, str | Path) or not isinstance(b, str | Path):
        raise UsageError(
            "cannot compare a saved result with a live workload: pass two files or two workloads"
        )
    given = candidates, processes, metric, device, seed, budget
    if given != (((), ()), 1, "latency", None, 0, BUDGET):
        raise UsageError(
            "candidates, processes, metric, device, seed and budget apply only to live "
            "comparisons: omit them for saved results"
        )
    return compare_files(a, b)[0]


def compare_live(
    a: Contender,
    b: Contender,
    *,
    processes: int = 1,
    metric: str = "latency",
    device: str | None = None,
    seed: int = 0,
    budget: str | float = BUDGET,
    progress: Callable[[str], None] = lambda message: None,
    on_pair: Callable[[int, int], None] = lambda number, most: None,
) -> CompareResult:
    """Times two workloads in fresh workers, as pairs of blocks in random order.

    Ctrl-C ends the comparison early and keeps the pairs taken so far.

    The budget is divided evenly among the pairs of workers. Each pair of workers takes at least one
    pair of blocks, even if that exceeds the budget. The budget does not change the numbers of pairs
    at which a verdict can be reached.

    Args:
        a: the first workload.
        b: the second workload.
        processes: fresh pairs of workers; three or more support a claim for the machine.
        metric: `latency` or `period`.
        device: where to run; None for A's device.
        seed: seed of the block order.
        budget: time for all blocks, such as `5m`, or seconds; start and warm-up come on top.
        progress: called with progress messages.
        on_pair: called before each pair of blocks with its number and the maximum number of pairs.

    Raises:
        UsageError: a workload fails before anything was timed, or an argument is wrong.
        KeyboardInterrupt: interrupted by the user before the first pair.
    """
    if processes < 1:
        raise UsageError(f"cannot compare in {processes} processes: give 1 or more")
    if metric not in METRICS:
        raise UsageError(f"unknown metric {metric!r}: choose one of {', '.join(METRICS)}")
    seconds = parse_duration(budget)
    target = resolve_device(device or str(a[0].device))
    rng, done, ended = Random(seed), list[_Taken](), None
    with shared_folder() as one, shared_folder() as other:
        folders = (one, other)
        for folder, (workload, _, _) in zip(folders, (a, b), strict=True):
            save_payload(workload, folder)
        while len(done) < processes and ended is None:
            progress(f"pair of processes {len(done) + 1} of {processes}")
            left = seconds - sum(taken.seconds for taken in done)
            limit = _Limit(left / (processes - len(done)), on_pair)
            taken = _one_pair(folders, (a, b), target, metric, rng, limit, alone=not done)
            done.append(taken)
            ended = taken.ended
    if not any(taken.pairs for taken in done):
        raise UsageError(str(ended)) if isinstance(ended, _Fails) else KeyboardInterrupt
    times = np.concatenate([np.reshape(taken.pairs, (-1, 2)) for taken in done])
    effect = _combined(done)
    notes = [_too_few(processes), _cut_short(effect, done, seconds)]
    return CompareResult.of(
        effect,
        a=Side(a[2], float(np.median(times[:, 0]))),
        b=Side(b[2], float(np.median(times[:, 1]))),
        metric=metric,
        note=f"stopped early: {ended}"
        if isinstance(ended, _Fails)
        else "; ".join(filter(None, notes)),
        samples=tuple(tuple(taken.pairs) for taken in done),
        failed=str(ended) if isinstance(ended, _Fails) else None,
        interrupted=isinstance(ended, KeyboardInterrupt),
        dwells=done[0].dwells,
    )


def _too_few(processes: int) -> str:
    """Returns a note if there are too few pairs of processes for a verdict; else ""."""
    if processes == 1 or processes >= LEAST_PROCESSES:
        return ""
    return (
        f"{processes} pairs of processes are too few for a verdict: use 1 for a verdict about "
        f"these processes, or {LEAST_PROCESSES} or more for the machine"
    )


def _cut_short(effect: Effect, done: Sequence[_Taken], budget_s: float) -> str:
    """Returns a note if the budget ended a comparison without a verdict; else ""."""
    cut = [taken for taken in done if taken.cut_short]
    if not cut or effect.verdict != "undecided":
        return ""
    if len(done) == 1:
        what = f"after {len(cut[0].pairs)} of at most {LOOKS[-1]} pairs of blocks"
    else:
        what = f"early in {len(cut)} of {len(done)} pairs of processes"
    return f"the budget of {budget_s:g} s ended {what}: raise --budget"


class _Limit(NamedTuple):
    """Time limit for one pair of processes, and the callback before each pair of blocks."""

    seconds: float
    on_pair: Callable[[int, int], None]


class _Fails(Exception):  # noqa: N818 - a workload's failure as a message
    """One of the two workloads failed."""


class _Taken(NamedTuple):
    """Samples of one pair of processes, and the reason if sampling ended early."""

    pairs: list[tuple[float, float]]
    ended: _Fails | KeyboardInterrupt | None
    dwells: tuple[SustainedRun, ...] = ()
    cut_short: bool = False
    seconds: float = 0.0


def _one_pair(
    folders: Sequence[Path],
    sides: Sequence[Contender],
    device: str,
    metric: str,
    rng: Random,
    limit: _Limit,
    alone: bool,
) -> _Taken:
    """Times pairs of blocks in two workers until a verdict is reached or the time is up.

    With `alone`, also calls `run_sustained` on CUDA, unless the time is up.
    """
    times: tuple[list[float], list[float]] = ([], [])
    workers: list[Worker] = []
    ended, found, cut_short = None, (), False
    start_s = seconds = 0.0
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

        def stop() -> bool:
            nonlocal cut_short
            taken = len(times[0])
            cut_short = taken > 0 and monotonic() - start_s >= limit.seconds
            if not cut_short:
                limit.on_pair(taken + 1, LOOKS[-1])
            return cut_short

        start_s = monotonic()
        race_pairs(partial(block, 0), partial(block, 1), rng=rng, stop=stop)
        seconds = monotonic() - start_s
        if alone and not cut_short and device.startswith("cuda"):
            found = run_sustained(series, rng)
    except (_Fails, KeyboardInterrupt) as reason:
        ended = reason
    finally:
        for worker in workers:
            worker.kill()
    # If interrupted within a pair, one side has an extra block.
    return _Taken(list(zip(*times, strict=False)), ended, found, cut_short, seconds)


def _of(side: Contender, ask: Callable[..., _T], *arguments: Any) -> _T:
    """Calls a worker; if the worker fails, raises `_Fails` with the name of the workload."""
    try:
        return ask(*arguments)
    except WorkerFault as fault:
        raise _Fails(f"the workload {side[2]} fails: {fault.reason}") from fault


def _combined(done: Sequence[_Taken]) -> Effect:
    """Computes the effect from one pair of processes, or from several pairs as replicates."""
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
