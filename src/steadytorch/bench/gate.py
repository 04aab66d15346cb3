"""Performance gate for CI: compares the working tree with a base revision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import msgspec
import numpy as np

from steadytorch.bench.compare import LONG_NS, METRICS
from steadytorch.bench.measure import SETUP_S
from steadytorch.bench.revision_worker import MISSING, STRAY, Loaded, split
from steadytorch.device.facts import resolve_device
from steadytorch.errors import UsageError, one_line
from steadytorch.measure.race import (
    ALPHA,
    LEAST_PROCESSES,
    compare,
    judge,
    machine_claim,
)
from steadytorch.process.folder import shared_folder
from steadytorch.process.interpreter import Interpreter
from steadytorch.process.worker import Fault, Worker, WorkerFault
from steadytorch.quantities import counted, parse_duration
from steadytorch.results.compare import Interval
from steadytorch.results.gate import GateResult, GateRow, Revision, RowStatus
from steadytorch.results.measure import SetUp
from steadytorch.revisions.environment import (
    given_environment,
    installed_environment,
    shared_environment,
)
from steadytorch.revisions.repository import Repository

HANDLER = "steadytorch.bench.revision_worker:RevisionHandler"
THRESHOLD = 0.01
"""Slowdown from which a gate fails. It is twice the tie band of a comparison. Rebuilding or moving
unchanged code shifts times by up to about as much, because memory is laid out differently
(T. Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!", 2009)."""
PROCESSES = 40
"""Most fresh pairs of processes for each workload. They find 3 % in 99 of 100 gates if processes
scatter by 2 % (`benchmarks/results/gate-simulation*`)."""
PROCESS_LOOKS = (5, 8, 12, 18, 27, 40)
"""Numbers of processes at which a workload may be judged. The error probability is divided among
those up to the maximum."""
LEAST_PAIRS, MOST_PAIRS = 20, 100
"""Pairs of blocks in each process. The number is settled before the first pair, so that no estimate
depends on when its process stopped."""
TIMED_NS = 2_000_000_000
"""Time for the pairs of a process, about what its start costs: on two shared cores, a workload of
1.5 ms scattered by 4 % between processes of 20 pairs, and by 2 % between those of 100 or 200."""
SIDES = ("base", "head")


def gate(
    workloads: Sequence[str],
    *,
    base: str,
    folder: str | Path = ".",
    base_env: str | None = None,
    install: bool = False,
    threshold: float = THRESHOLD,
    processes: int = PROCESSES,
    budget: str | float | None = None,
    metric: str = "latency",
    batch: int | None = None,
    inputs: Sequence[str] = (),
    train: bool = False,
    device: str = "auto",
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> GateResult:
    """Compares workloads of the working tree with those of a base revision.

    Each revision is loaded in fresh processes from its own source tree. Blocks of the two revisions
    alternate in random order. Further pairs of processes are started until every workload is
    decided.

    The false-verdict probability of 1 % covers all workloads together. Each workload gets an equal
    share (Bonferroni), divided equally among the process counts at which the workload may be
    judged.

    Ctrl-C ends the gate early and keeps the samples taken so far.

    Args:
        workloads: names or factories, as for `load_workload`, with optional `@TRANSFORM`.
        base: revision to compare with, such as `origin/main`.
        folder: a folder of the repository; factories are looked up from there.
        base_env: Python executable for the base; None for this one.
        install: whether to install each side into a virtual environment of its own.
        threshold: slowdown from which the gate fails, as a fraction.
        processes: most fresh pairs of processes for each workload; five or more.
        budget: total time, such as `10m`, after which no further processes start; None for no
            limit. Three pairs of processes of each workload are timed in any case.
        metric: `latency` or `period`.
        batch: batch size of all workloads.
        inputs: inputs of all workloads.
        train: whether to time training steps.
        device: where to run.
        seed: seed of weights, inputs and the block order.
        progress: called with progress messages.

    Raises:
        UsageError: an argument is wrong, the base does not exist or does not install, or a workload
            exists on neither side.
        UnsupportedError: git is missing.
        KeyboardInterrupt: interrupted by the user before anything was timed.
    """
    _check(workloads, threshold, processes, metric, base_env, install)
    seconds = None if budget is None else parse_duration(budget)
    target = resolve_device(device)
    start = Path(folder).resolve()
    repository = Repository.around(start)
    commits = repository.commit(base), repository.commit("HEAD")
    changed = len(repository.changed())
    shape = {"batch": batch, "inputs": list(inputs), "train": train, "seed": seed}
    names = [_within(name, repository.root) for name in workloads]
    with contextlib.ExitStack() as at_the_end:
        scratch = at_the_end.enter_context(shared_folder())
        progress(f"checking out {base}")
        places = at_the_end.enter_context(
            _places(repository, commits, start, scratch, base, base_env, install, progress)
        )
        race = Race(places, repository.root, target, metric, shape, scratch)
        arms = [_Arm(given, name) for given, name in zip(workloads, names, strict=True)]
        looks = _looks(processes)
        alpha = ALPHA / (len(arms) * len(looks))
        interrupted = _run(race, arms, looks, alpha, threshold, seconds, Random(seed), progress)
    rows = tuple(arm.row(alpha, threshold) for arm in arms)
    return GateResult(
        base=Revision(base, commits[0]),
        head=Revision("working tree", commits[1], changed),
        threshold=threshold,
        familywise_alpha=ALPHA,
        metric=metric,
        rows=rows,
        gate_failed=any(row.verdict == "slower" for row in rows),
        notes=_notes(repository, changed),
        interrupted=interrupted,
    )


def _check(
    workloads: Sequence[str],
    threshold: float,
    processes: int,
    metric: str,
    base_env: str | None,
    install: bool,
) -> None:
    if not workloads:
        raise UsageError("a gate needs at least one workload")
    if twice := sorted({name for name in workloads if list(workloads).count(name) > 1}):
        raise UsageError(f"{twice[0]} is given twice: name each workload once")
    if not 0 <= threshold < 1:
        raise UsageError(f"threshold {threshold} is not a fraction between 0 and 1")
    if processes < PROCESS_LOOKS[0]:
        raise UsageError(
            f"{processes} processes are too few for a gate: use {PROCESS_LOOKS[0]} or more, "
            "because processes of one program differ"
        )
    if metric not in METRICS:
        raise UsageError(f"unknown metric {metric!r}: choose one of {', '.join(METRICS)}")
    if install and base_env is not None:
        raise UsageError("install and base_env exclude each other: install makes an environment")


def _looks(processes: int) -> tuple[int, ...]:
    """Returns the process counts at which a workload may be judged; the last is the maximum."""
    return (*(look for look in PROCESS_LOOKS if look < processes), processes)


def _notes(repository: Repository, changed: int) -> tuple[str, ...]:
    notes = []
    if changed:
        notes.append(f"The head is the working tree, with {counted(changed, 'uncommitted file')}.")
    if repository.has_submodules():
        notes.append("Submodules are not checked out on the base.")
    return tuple(notes)


def _within(name: str, root: Path) -> str:
    """Replaces the repository root in a workload's absolute path by the placeholder `_ROOT`."""
    spec, settings = split(name)
    source, colon, factory = spec.rpartition(":")
    path = Path(source)
    if not (colon and path.is_absolute() and path.resolve().is_relative_to(root)):
        return name
    inside = f"{_ROOT}{path.resolve().relative_to(root)}:{factory}"
    return f"{inside}@{settings}" if settings else inside


_ROOT = "{root}/"
"""Stands for a side's tree in names of workloads."""


class _Place(NamedTuple):
    """One side of a gate (base or head): its name, source tree and Python interpreter."""

    name: str
    tree: Path
    interpreter: Interpreter


@contextlib.contextmanager
def _places(
    repository: Repository,
    commits: tuple[str, str],
    start: Path,
    scratch: Path,
    base: str,
    base_env: str | None,
    install: bool,
    progress: Callable[[str], None],
) -> Iterator[tuple[_Place, _Place]]:
    """Yields base and head, with their trees checked out and their environments made."""
    root = repository.root
    inside = start.relative_to(root)
    with contextlib.ExitStack() as trees:
        base_tree = trees.enter_context(repository.worktree(commits[0], "base"))
        (base_tree / inside).mkdir(parents=True, exist_ok=True)  # may be new on the head
        folders = [scratch / side for side in SIDES]
        for folder in folders:
            folder.mkdir()
        if install:
            head_tree = trees.enter_context(repository.worktree(commits[1], "head"))
            repository.copy_onto(head_tree)
            made = []
            for tree, folder, what in zip(
                (base_tree, head_tree), folders, (f"base {base}", "the working tree"), strict=True
            ):
                progress(f"installing {what}")
                made.append(installed_environment(tree, tree / inside, folder, what))
            yield _Place("base", base_tree, made[0]), _Place("head", head_tree, made[1])
            return
        there = base_tree / inside
        one = (
            shared_environment(root, base_tree, there)
            if base_env is None
            else given_environment(base_env, base_tree, there, folders[0])
        )
        other = shared_environment(root, root, start)
        yield _Place("base", base_tree, one), _Place("head", root, other)


class Ended(Exception):  # noqa: N818 - an outcome, not an error
    """Raised when a workload cannot be judged.

    Attributes:
        status: status of the workload's row.
    """

    def __init__(self, status: RowStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: RowStatus = status


class _Arm:
    """One workload of a gate, with its samples so far and its outcome.

    Args:
        given: its name as the user typed it.
        name: its name for workers, see `_within`.
    """

    def __init__(self, given: str, name: str) -> None:
        self.given, self.name = given, name
        self.taken: list[list[tuple[float, float]]] = []
        self.ended: Ended | None = None
        self.is_decided = False

    @property
    def is_live(self) -> bool:
        """Whether the workload needs further processes."""
        return self.ended is None and not self.is_decided

    def look(self, alpha: float, threshold: float) -> None:
        """Marks the workload as decided if the processes so far support a verdict."""
        verdict = machine_claim(self._estimates(), alpha=alpha, tie=threshold)
        self.is_decided = _verdict(verdict.low, verdict.high, threshold) != "undecided"

    def _estimates(self) -> list[float]:
        found = [judge(pairs, looks=(len(pairs),)).estimate for pairs in self.taken]
        return [each for each in found if each is not None]

    def row(self, alpha: float, threshold: float) -> GateRow:
        """The outcome as data."""
        own: dict[str, Any] = {"workload": self.given}
        if self.taken:
            times = np.concatenate([np.reshape(pairs, (-1, 2)) for pairs in self.taken])
            own |= {
                "base_median_ns": float(np.median(times[:, 0])),
                "head_median_ns": float(np.median(times[:, 1])),
                "processes": len(self.taken),
                "pairs": len(times),
                "samples": tuple(tuple(pairs) for pairs in self.taken),
            }
        if self.ended is not None:
            return GateRow(**own, status=self.ended.status, reason=str(self.ended))
        if len(self.taken) < LEAST_PROCESSES:
            reason = f"{counted(len(self.taken), 'pair')} of processes, too few for a verdict"
            return GateRow(**own, status="skipped", reason=reason)
        claim = machine_claim(self._estimates(), alpha=alpha, tie=threshold)
        return GateRow(
            **own,
            status="judged",
            verdict=_verdict(claim.low, claim.high, threshold),
            interval=Interval(claim.estimate, claim.low, claim.high),
            alpha=alpha,
            mde=claim.mde,
        )


def pair_count(pair_ns: float) -> int:
    """Number of pairs of blocks to time, given the time of one pair in ns."""
    return int(min(MOST_PAIRS, max(LEAST_PAIRS, TIMED_NS // pair_ns)))


def _verdict(low: float | None, high: float | None, threshold: float) -> str:
    if low is None or high is None:
        return "undecided"
    if low > threshold:
        return "slower"
    if high < -threshold:
        return "faster"
    return "tie" if -threshold <= low and high <= threshold else "undecided"


class Race(NamedTuple):
    """Settings that all processes of a gate share.

    Attributes:
        places: base and head.
        root: the working tree, whose code must not reach the base.
        device: where to run.
        metric: `latency` or `period`.
        shape: shape options of all workloads.
        scratch: folder for logs.
    """

    places: tuple[_Place, _Place]
    root: Path
    device: str
    metric: str
    shape: dict[str, Any]
    scratch: Path

    def take(self, arm: _Arm, number: int, rng: Random) -> None:
        """Times a workload in one fresh pair of processes; sets `arm.ended` if it cannot be judged.

        Samples of an interrupted or failed pair of processes are discarded, because every pair of
        processes has the same weight.
        """
        workers: list[Worker] = []
        try:
            for place in self.places:
                workers.append(self._started(place, number))
            self._load(arm, workers)
            arm.taken.append(self._pairs(workers, rng))
        except Ended as ended:
            arm.ended = ended
        finally:
            for worker in workers:
                worker.kill()

    def _started(self, place: _Place, number: int) -> Worker:
        log = f"{place.name}-{number}"
        try:
            return Worker(HANDLER, self.scratch, log, interpreter=place.interpreter)
        except OSError as error:
            python = place.interpreter.python
            why = error.strerror or one_line(error)
            raise Ended("failed", f"the {place.name}'s {python} cannot start: {why}") from error

    def _load(self, arm: _Arm, workers: Sequence[Worker]) -> None:
        """Loads a workload on base and head at the same time, since nothing is timed yet.

        Raises:
            Ended: the workload is missing on a side, or fails there.
            UsageError: the workload exists on neither side.
        """
        for place, worker in zip(self.places, workers, strict=True):
            worker.send(
                "load_named",
                workload=arm.name.replace(_ROOT, f"{place.tree}/", 1),
                device=self.device,
                shape=self.shape,
                own=str(place.tree),
                foreign=str(self.root) if place.tree != self.root else None,
            )
        replies = []
        for i, worker in enumerate(workers):
            reply = self._of(i, partial(worker.receive, SETUP_S))
            replies.append(msgspec.convert(reply, Loaded))
        base, head = (reply.status == MISSING for reply in replies)
        if base and head:
            raise UsageError(f"{arm.given} exists on neither side: {replies[1].reason}")
        if base:
            raise Ended("added", "it exists on the head only")
        if head:
            raise Ended("removed", "it exists on the base only")
        for place, reply in zip(self.places, replies, strict=True):
            if reply.status == STRAY:
                raise Ended(
                    "failed",
                    f"the {place.name} cannot be kept apart: {reply.reason}; use --install",
                )

    def _pairs(self, workers: Sequence[Worker], rng: Random) -> list[tuple[float, float]]:
        for worker in workers:  # at the same time, since nothing is timed yet
            worker.send("set_up_named")
        replies = [self._of(i, partial(workers[i].receive, SETUP_S)) for i in range(2)]
        set_ups = msgspec.convert(replies, list[SetUp])
        longest = max(set_up.warm_up.iteration_ns for set_up in set_ups)
        count = 3 if longest >= LONG_NS else 7
        deadline_s = 60.0 + 40e-9 * count * longest

        def block(i: int) -> float:
            times = partial(workers[i].call, "block", deadline_s, metric=self.metric, count=count)
            return float(np.median(self._of(i, times)))

        pairs = pair_count(2 * count * longest)
        return compare(partial(block, 0), partial(block, 1), rng=rng, looks=(pairs,))[1]

    def _of(self, i: int, ask: Callable[[], Any]) -> Any:
        """Calls the worker of base or head; an error message names the side at fault.

        Raises:
            Ended: the worker failed.
        """
        try:
            return ask()
        except WorkerFault as fault:
            place = self.places[i]
            reason = fault.reason
            if fault.fault is Fault.EXIT and fault.detail:  # Python itself could not start it
                reason = f"{reason}: {fault.detail.splitlines()[-1][:200]}"
            raise Ended("failed", f"it fails on the {place.name}: {reason}") from fault


def _run(
    race: Race,
    arms: Sequence[_Arm],
    looks: Sequence[int],
    alpha: float,
    threshold: float,
    seconds: float | None,
    rng: Random,
    progress: Callable[[str], None],
) -> bool:
    """Times pairs of processes until all workloads are decided; returns whether interrupted.

    Raises:
        KeyboardInterrupt: interrupted before any pair was taken.
    """
    began = monotonic()
    try:
        for number in range(1, looks[-1] + 1):
            late = seconds is not None and monotonic() - began > seconds
            if late and number > LEAST_PROCESSES:
                return False
            for arm in arms:
                if arm.is_live:
                    most_s = (monotonic() - began) / max(1, number - 1) * (looks[-1] - number + 1)
                    if seconds is not None:
                        most_s = min(most_s, max(seconds - (monotonic() - began), 1.0))
                    left = f", {-(-most_s // 60):.0f} min left at most" if number > 1 else ""
                    progress(
                        f"{arm.given}: pair of processes {number} of at most {looks[-1]}{left}"
                    )
                    race.take(arm, number, rng)
                if arm.is_live and number in looks:
                    arm.look(alpha, threshold)
            if not any(arm.is_live for arm in arms):
                return False
    except KeyboardInterrupt:
        if not any(arm.taken for arm in arms):
            raise
        return True
    return False
