"""Prepares candidates for timing: starts a worker, applies the transforms and verifies outputs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import torch

from steadytorch.findings.finding import Finding
from steadytorch.process.worker import Fault, Worker, WorkerFault, wait_any
from steadytorch.results.candidate import Candidate, TransformSpec, describe
from steadytorch.transforms import compiles
from steadytorch.transforms.precision import ALLOWED
from steadytorch.tune.candidates import suggested_by
from steadytorch.tune.select import SearchOptions, over_memory
from steadytorch.tune.trial import Launcher, LiveTrial
from steadytorch.tune.tuning_worker import Character, Explained
from steadytorch.verification.verdict import Reference, decide

EXPLAIN_DEADLINE_S = 60.0
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
"""Modules that workers of compiled candidates import at start; the import takes seconds."""


class ProgressListener(Protocol):
    """Receives the progress events of a candidate search; see `report.progress`."""

    def phase(self, message: str) -> None:
        """Called when a new phase of the search begins."""
        ...

    def trial(self, label: str, state: str, detail: str = "") -> None:
        """Called when a candidate changes state: set-up, verified, rejected, failed or skipped."""
        ...

    def timed(self, label: str, median_ns: float) -> None:
        """Called when a candidate has been screened; `median_ns` is its median time so far."""
        ...

    def tick(self) -> None:
        """Called regularly so that the display can be redrawn, but never during a timed block."""
        ...


class NullListener:
    """A progress listener that ignores all events."""

    def phase(self, message: str) -> None:
        """Ignored."""

    def trial(self, label: str, state: str, detail: str = "") -> None:
        """Ignored."""

    def timed(self, label: str, median_ns: float) -> None:
        """Ignored."""

    def tick(self) -> None:
        """Ignored."""


class SetupScheduler:
    """Starts a worker process per candidate and runs its loading, set-up and verification.

    Args:
        launch: starts worker processes.
        device: where workers run, as a torch device string.
        ambient: the caller's process-wide settings, which the workers adopt.
        options: the user's options.
        watcher: receives progress.
        spare_cores: whether the host has cores for the reference beside the untouched workload.
        now: returns seconds on a monotonic clock.
        others: further devices of the same kind. Each runs the untouched workload and a share of
            the candidates.
        runs_on: maps device names to torch devices; other names are torch devices themselves.

    Attributes:
        device: as given.
        devices: all devices in use, `device` first.
        left_out: maps each device that is no longer used to the reason.
        further: the untouched workload on each further device.
        shares_cores: whether set-ups take cores from the workload that is timed, as on a CPU.
    """

    def __init__(
        self,
        launch: Launcher,
        device: str,
        ambient: dict[str, str],
        options: SearchOptions,
        watcher: ProgressListener,
        spare_cores: bool = False,
        now: Callable[[], float] = time.monotonic,
        others: Sequence[str] = (),
        runs_on: Mapping[str, str] | None = None,
    ) -> None:
        self._launch, self.device, self._ambient = launch, device, ambient
        self._runs_on = dict(runs_on or {})
        self.devices, self.left_out = (device, *others), dict[str, str]()
        self.further: list[LiveTrial] = []
        self._placed: Counter[str] = Counter()
        self._options, self._watcher = options, watcher
        self._workers: list[Worker] = []
        self._now = now
        self.shares_cores = torch.device(self._torch_device(device)).type == "cpu"
        self._beside = spare_cores and not self.shares_cores
        self._for_reference: Worker | None = None
        self._for_untouched: Worker | None = None
        self._retried: set[Candidate] = set()
        self.reference: Reference | None = None
        self.character: Character | None = None
        self.findings: tuple[Finding, ...] = ()
        """Findings from a few profiled steps of the untouched workload."""
        self.retry: list[Candidate] = []
        """Candidates that ran out of memory beside other workers and will be retried alone."""
        self._lost = set[Candidate]()
        self.under_way: list[LiveTrial] = []
        """Trials that have begun but that `prepare` has not returned yet."""
        self._waiting: list[tuple[Candidate, float]] = []
        self._slots = 1

    def start(self) -> Worker:
        """Starts the reference worker and the untouched workload's worker in the background.

        `baseline` calls `start` too; workers that are still alive are reused.

        Returns:
            The worker that will make the reference.
        """
        if self._for_reference is None or not self._for_reference.alive:
            self._for_reference = self._started("reference")
        if self._for_untouched is None or not self._for_untouched.alive:
            self._for_untouched = self._started()
        return self._for_reference

    def baseline(self, remaining: Callable[[], float]) -> LiveTrial:
        """Sets up the untouched workload in one worker and makes reference outputs in another.

        Also continues the set-up of queued candidates, and sets up the untouched workload on each
        further device. A further device on which the untouched workload fails is left out.

        Raises:
            WorkerFault: the untouched workload fails, or time ran out.
        """
        reference, trial = self.start(), self._new_trial((), device=self.device)
        left_s = remaining()
        worker = trial.worker
        for each in (reference, worker):
            self._load(each, self.device)
        further = [self._new_trial((), left_s, device) for device in self.devices[1:]]
        self._under_way_from_now(further)
        self.pump_until(reference, left_s, loads=True)
        made_in_s = self._ask_for_reference(reference, remaining) if self._beside else None
        self.pump_until(worker, left_s, loads=True)
        left_s = remaining()
        worker.send("set_up", candidate=[])
        trial.accept_set_up(self.pump_until(worker, left_s))
        if (over := self._over_memory(trial)) is not None:
            trial.reason = f"the untouched workload itself {over}"
            self._watcher.phase(f"{trial.reason}: looking for candidates below the cap")
        trial.stage = "timing"
        if made_in_s is None:
            made_in_s = self._ask_for_reference(reference, remaining)
        made = self.pump_until(reference, made_in_s)
        self.reference = msgspec.convert(made, Reference)
        explained = self._explained(reference, remaining())
        reference.kill()
        self.findings = explained.findings
        flops = explained.product_flops
        with self.paused():
            character = worker.call("characterise", remaining(), product_flops=flops)
        self.character = msgspec.convert(character, Character)
        self._watcher.trial("untouched", "verified")
        self._finish_further(further)
        return trial

    def _finish_further(self, trials: Sequence[LiveTrial]) -> None:
        while set(trials).intersection(self.unfinished):
            self._tend([], 1)
        self.under_way = [trial for trial in self.under_way if trial not in trials]
        self.further = [trial for trial in trials if trial.ok]
        for trial in trials:
            if not trial.ok:
                self.leave_out(trial.device, f"the untouched workload fails: {trial.reason}")

    def leave_out(self, device: str, why: str, lost: Sequence[LiveTrial] = ()) -> None:
        """Stops using a further device; its candidates are set up again on other devices.

        Args:
            device: the device.
            why: the reason, for the user.
            lost: trials on the device that `prepare` has returned and that were not yet beaten.
        """
        self._watcher.phase(f"going on without {device}: {why}")
        self.left_out[device] = why
        self.devices = tuple(each for each in self.devices if each != device)
        self.further = [trial for trial in self.further if trial.device != device]
        gone = [
            trial for trial in self.under_way if trial.device == device and trial.status == "ok"
        ]
        self.under_way = [trial for trial in self.under_way if trial not in gone]
        for trial in gone:
            trial.worker.kill()
        self._lost.update(trial.candidate for trial in lost)
        again = [(trial.candidate, trial.deadline_s) for trial in (*lost, *gone)]
        self._waiting = [*again, *self._waiting]

    def _ask_for_reference(self, worker: Worker, remaining: Callable[[], float]) -> float:
        """Asks a worker for the reference outputs; returns the timeout for the answer in s."""
        left_s = remaining()
        worker.send("reference", seed=self._options.seed)
        return left_s

    def _explained(self, worker: Worker, deadline_s: float) -> Explained:
        """Findings from profiled steps of the untouched workload; empty if profiling fails.

        Profiles in the reference's worker, because a process must not be timed after profiling.
        """
        try:
            worker.send("explained")
            found = self.pump_until(worker, min(deadline_s, EXPLAIN_DEADLINE_S))
        except WorkerFault as fault:
            self._watcher.phase(f"profiling failed ({fault.reason}): continuing without findings")
            return Explained((), None)
        return msgspec.convert(found, Explained)

    @property
    def begun(self) -> tuple[Candidate, ...]:
        """Candidates passed to `begin` but not yet returned by `prepare`, including queued ones."""
        started = (trial.candidate for trial in self.under_way)
        return (*started, *(candidate for candidate, *_ in self._waiting))

    @property
    def owes(self) -> bool:
        """Whether a candidate still awaits its second set-up.

        One that ran out of memory beside others gets a retry alone. One that was lost with its
        device, and may have led, is set up again on another device.
        """
        return bool(self.retry or (self._retried | self._lost).intersection(self.begun))

    @property
    def ready(self) -> list[LiveTrial]:
        """Verified trials that are waiting to be timed."""
        return [trial for trial in self.under_way if trial.ok and trial.stage == "timing"]

    def begin(self, candidates: Sequence[Candidate], slots: int, deadline_s: float) -> None:
        """Queues candidates for set-up, which `pump_until` and `prepare` carry out.

        Args:
            candidates: candidates to set up.
            slots: how many candidates may be under way at once.
            deadline_s: timeout in seconds for each stage of these candidates.
        """
        self._slots = slots
        self._waiting.extend((candidate, deadline_s) for candidate in candidates)

    def finished(self, candidate: Candidate) -> LiveTrial | None:
        """Waits until a queued candidate is verified or rejected; None if it was never queued."""
        while candidate in [each[0] for each in self._waiting] or any(
            trial.candidate == candidate for trial in self.unfinished
        ):
            self._tend([], 1)
        return next((t for t in self.under_way if t.candidate == candidate), None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses all workers in set-up within the block, so that they do not disturb a timing."""
        live = self.unfinished
        for trial in live:
            trial.pause(self._now())
        try:
            yield
        finally:
            for trial in live:
                trial.resume(self._now())

    def elapsed_s(self, trial: LiveTrial) -> float:
        """Seconds since a trial's set-up began, excluding pauses."""
        return self._now() - trial.began_s

    def pump_until(self, worker: Worker, deadline_s: float, loads: bool = False) -> Any:
        """Waits for a worker's answer while continuing the set-up of queued candidates.

        Args:
            worker: the worker to wait for.
            deadline_s: see `Worker.receive`.
            loads: whether the worker only loads, so that compilers need not pause on a CPU.

        Raises:
            WorkerFault: the worker fails or times out; see `Worker.receive`.
        """
        while not (worker.ready() or worker.overdue(deadline_s)):
            self._tend([worker], 1, makes_way=not loads)
        return worker.receive(deadline_s)

    def prepare(
        self,
        candidates: Sequence[Candidate],
        slots: int,
        deadline_s: float,
        others: int,
        is_due: Callable[[], bool] = lambda: False,
    ) -> list[LiveTrial]:
        """Sets up candidates in parallel and verifies each against the reference outputs.

        Returns when all candidates are finished, or once `is_due` returns True. In the latter case,
        unfinished candidates stay under way.

        Args:
            candidates: candidates to set up, in addition to those already begun.
            slots: how many candidates may be under way at once; a retry always runs alone.
            deadline_s: timeout in seconds for each stage.
            others: number of other workers that stay alive and take memory.
            is_due: whether to return although candidates are unfinished.

        Returns:
            A trial per finished candidate: verified, or rejected with a reason.
        """
        self.retry = [candidate for candidate in self.retry if candidate not in candidates]
        alone = bool(self._retried.intersection(candidates))
        self.begin(candidates, 1 if alone else slots, deadline_s)
        while (self._waiting or self.unfinished) and not is_due():
            self._tend([], others)
        left = self.unfinished
        done = [trial for trial in self.under_way if trial not in left]
        self.under_way = left
        return done

    def give_up(self, why: str, having: TransformSpec | None = None) -> None:
        """Skips unfinished trials with the given reason and drops queued candidates.

        Args:
            why: the reason.
            having: give up only candidates with this transform; None for all.
        """

        def goes(candidate: Candidate) -> bool:
            return having is None or having in candidate

        self._waiting = [each for each in self._waiting if not goes(each[0])]
        for trial in (each for each in self.unfinished if goes(each.candidate)):
            trial.skip(f"{trial.stage}: {why}")
            self._watcher.trial(describe(trial.candidate), trial.status, trial.reason or "")

    @property
    def unfinished(self) -> list[LiveTrial]:
        """Trials that are still being set up or verified."""
        return [t for t in self.under_way if t.status == "ok" and t.stage != "timing"]

    def _tend(self, also: Sequence[Worker], others: int, makes_way: bool = False) -> None:
        """Starts queued candidates in free slots, waits up to 0.25 s and handles worker answers."""
        self._begin_waiting()
        live = self.unfinished
        self._share_cores(live, makes_way)
        if not (self.shares_cores and makes_way):
            self._verify_waiting(live)
        wait_any([*(trial.worker for trial in live), *also], 0.25)
        self._watcher.tick()
        for trial in live:
            if trial.worker.ready() or trial.worker.overdue(trial.deadline_s):
                self._advance(trial, crowded=others + len(self.unfinished) > 1)

    def _share_cores(self, trials: Sequence[LiveTrial], makes_way: bool) -> None:
        """On a CPU, pauses the workers of compiled candidates while another worker runs a model.

        The model's threads wait for each other at barriers: a warm-up of 1 s took 14 s beside a
        compiler.
        """
        if not self.shares_cores:
            return
        compiling = [trial for trial in trials if compiles(trial.candidate)]
        others = [trial for trial in trials if trial not in compiling]
        if makes_way or any(trial.stage in ("set-up", "verification") for trial in others):
            for trial in compiling:
                trial.pause(self._now())
        else:
            for trial in compiling:
                trial.resume(self._now())

    def _verify_waiting(self, trials: Sequence[LiveTrial]) -> None:
        """Starts verifying candidates that are set up, once the reference outputs are ready."""
        for trial in trials:
            if trial.stage == "waiting" and self.reference is not None:
                trial.stage = "verification"
                trial.worker.send("verify")

    def _begin_waiting(self) -> list[LiveTrial]:
        """Starts queued candidates in free slots; returns their trials."""
        room = max(0, self._slots - len(self.unfinished))
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        begun: list[LiveTrial] = []
        for each in taken:  # one at a time, since each placement affects the next
            begun.append(self._new_trial(*each))
            self._under_way_from_now(begun[-1:])
        return begun

    def _under_way_from_now(self, trials: Sequence[LiveTrial]) -> None:
        for trial in trials:
            trial.began_s = self._now()
            self._load(trial.worker, trial.device)
        self.under_way += trials

    def _load(self, worker: Worker, device: str) -> None:
        worker.send("load", device=self._torch_device(device), ambient=self._ambient)

    def _torch_device(self, device: str) -> str:
        return self._runs_on.get(device, device)

    def _least_busy(self) -> str:
        """The device with the fewest set-ups under way; ties go to the fewest set-ups so far."""
        busy = Counter(trial.device for trial in self.unfinished)
        return min(self.devices, key=lambda device: (busy[device], self._placed[device]))

    def kill_all(self) -> None:
        """Kills every worker process that this scheduler started."""
        for worker in self._workers:
            worker.kill()

    def _started(self, name: str = "", candidate: Candidate = ()) -> Worker:
        imports = COMPILER if compiles(candidate) else ()
        worker = self._launch(name or f"trial-{len(self._workers)}", imports)
        self._workers.append(worker)
        return worker

    def _new_trial(
        self, candidate: Candidate, deadline_s: float = math.inf, device: str | None = None
    ) -> LiveTrial:
        device = device or self._least_busy()
        self._placed[device] += 1
        self._watcher.trial(describe(candidate), "set-up")
        worker, self._for_untouched = self._for_untouched, None
        if candidate or worker is None or not worker.alive:
            self._for_untouched, worker = worker, self._started(candidate=candidate)
        suggests = suggested_by(candidate, self.findings)
        return LiveTrial(candidate, worker, suggests, deadline_s, device)

    def _advance(self, trial: LiveTrial, crowded: bool) -> None:
        """Handles a worker's answer and starts the next stage of its trial."""
        try:
            reply = trial.worker.receive(trial.deadline_s)
            if trial.stage == "starting":
                trial.stage = "set-up"
                trial.worker.send("set_up", candidate=msgspec.to_builtins(trial.candidate))
            elif trial.stage == "set-up":
                trial.accept_set_up(reply)
                # The untouched workload needs no verification against itself.
                trial.stage = "waiting" if trial.candidate else "timing"
            else:
                self._accept_verification(trial, reply)
        except WorkerFault as fault:
            trial.reject(fault)
            if (
                fault.fault is Fault.OUT_OF_MEMORY
                and crowded
                and trial.candidate not in self._retried
            ):
                self._retried.add(trial.candidate)
                self.retry.append(trial.candidate)
        if not trial.ok:
            self._watcher.trial(describe(trial.candidate), trial.status, trial.reason or "")
        elif trial.stage == "timing":
            self._watcher.trial(describe(trial.candidate), "verified")

    def _accept_verification(self, trial: LiveTrial, reply: Any) -> None:
        assert self.reference is not None
        found = trial.accept_verification(reply)
        trial.stage = "timing"
        allowed = trial.precision in ALLOWED[self._options.precision]
        tolerance = self._options.tolerance if allowed else None
        reason = decide(found, self.reference, trial.precision, tolerance)
        trial.inexact = reason is not None and found.fault is None
        reason = reason or self._over_memory(trial)
        if reason is not None:
            trial.reject(reason)

    def _over_memory(self, trial: LiveTrial) -> str | None:
        assert trial.set_up is not None
        return over_memory(trial.set_up.peak_memory_bytes, self._options)
