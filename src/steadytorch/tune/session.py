"""Finds the plan of a workload: looks it up in the store, or searches for it and stores it."""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from steadytorch import __version__, transforms
from steadytorch.bench.bench_worker import save_payload
from steadytorch.compiled import artefact, compiler_choices
from steadytorch.device.facts import DeviceFacts, load_facts, resolve_device
from steadytorch.errors import PlanError, UsageError, one_line
from steadytorch.native import host
from steadytorch.plan.fingerprint import Key, make_key, trained_fingerprint
from steadytorch.plan.record import CompilerChoices, Evidence, Speedup
from steadytorch.plan.store import Found, Store
from steadytorch.process.worker import Worker
from steadytorch.quantities import parse_bytes, parse_duration
from steadytorch.ranks.agreement import Refusal
from steadytorch.ranks.group import Ranks, collective_in, ranks_of
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.results.signature import Signature
from steadytorch.results.tune import Timing
from steadytorch.serve import agreed
from steadytorch.serve.plan import Plan
from steadytorch.transforms import plugins
from steadytorch.transforms.base import NotApplicable
from steadytorch.transforms.plugin_worker import admit
from steadytorch.transforms.precision import half_of
from steadytorch.tune.bundle import keep_bundle
from steadytorch.tune.devices import Devices, choose_devices, devices_of_ranks, uuid_of
from steadytorch.tune.host_code import compile_now, reserve_s
from steadytorch.tune.result import TuneResult
from steadytorch.tune.search import ENGINES, EXHAUSTED, Search
from steadytorch.tune.search_server import SearchServer, set_ups_at_once
from steadytorch.tune.select import CONTENDED, SearchOptions
from steadytorch.tune.setup_scheduler import NullListener, ProgressListener, SetupScheduler
from steadytorch.tune.trial import WorkerLauncher
from steadytorch.workload import serialization
from steadytorch.workload.given import workload_of
from steadytorch.workload.workload import Workload

MODES = ("replay", "tune", "strict")
LONGER = 1.5
"""A search that ran out of time and found nothing faster is repeated if the budget is at least this
many times as long."""
log = logging.getLogger("steadytorch")

_FINISH_S = 10.0  # extra seconds for compiling host code after a search


class Session:
    """Tunes one workload on one device.

    Args:
        workload: the workload to tune; its model is never run in this process.
        options: the user's options.
        device: where to run, as a torch device string or `auto`; None for the workload's device.
        store: the plan store or its folder; None for the default one.
        devices: devices of one kind that share the search, from `choose_devices`; None for
            `device` alone.
        runs_on: torch device by name in `devices`, for tests without GPUs.
        facts: facts about the device; None to query them.
        fingerprint: fingerprint of the workload; None to compute it.
        signature: signature of the inputs; None to compute it.
        server: the server that the first search uses and closes; None to start one then.

    Attributes:
        facts: facts about the device.
        key: key of the plan.

    Raises:
        UsageError: the workload cannot be tuned.
        UnsupportedError: the device does not exist.
    """

    def __init__(
        self,
        workload: Workload,
        options: SearchOptions,
        device: str | None = None,
        store: Store | str | Path | None = None,
        *,
        devices: Devices | None = None,
        runs_on: Mapping[str, str] | None = None,
        facts: DeviceFacts | None = None,
        fingerprint: str | None = None,
        signature: Signature | None = None,
        server: SearchServer | None = None,
    ) -> None:
        if options.tolerance is not None and options.precision == "same":
            raise UsageError(
                f"tolerance {options.tolerance} does not apply to precision same, which is bound "
                "by the untouched workload's own error: choose a lower --precision"
            )
        self.workload = workload
        self.options = options = options.resolved(workload.is_training)
        self._devices, self._runs_on = devices, dict(runs_on or {})
        first = devices.names[0] if devices else device or str(workload.device)
        self._device = resolve_device(self._runs_on.get(first, first))
        if options.objective == CONTENDED and torch.device(self._device).type != "cpu":
            raise UsageError(
                f"objective {CONTENDED} is for CPUs, where a neighbour takes cores, not for "
                f"{self._device}: choose p99"
            )
        self.facts: DeviceFacts = facts or load_facts(self._device)
        self._ambient = transforms.ambient()
        self._signature = (signature or workload.signature()).on(torch.device(self._device).type)
        self.key: Key = make_key(
            workload,
            self._signature,
            self.facts,
            objective=options.objective,
            precision=options.precision,
            tolerance=options.tolerance,
            max_memory_bytes=options.max_memory_bytes,
            ambient=self._ambient,
            fingerprint=fingerprint,
        )
        self._store = store if isinstance(store, Store) else Store(store)
        self._converted: artefact.Held | None = None
        self._server = server

    @property
    def store_trouble(self) -> str:
        """Why plans are kept in memory only; empty if they are written to disk."""
        return self._store.trouble

    @property
    def gpu(self) -> str:
        """UUID of the GPU of this session; empty on a CPU."""
        return uuid_of(self._device)

    def share(self, gpus: Collection[str]) -> None:
        """Lets a search use the GPUs of other ranks, unless its devices were chosen already."""
        if self._devices is None and self.gpu:
            self._devices = devices_of_ranks(self._device, gpus)
            log.info("searching on %s for all ranks", ", ".join(self._devices.names))

    def look_up(self, explained: bool = True) -> tuple[Plan | None, str]:
        """The stored plan, or None and the reason for the miss.

        Args:
            explained: whether the reason lists the key fields that differ; see `Store.get`.
        """
        found = self._store.get(self.key, Plan, explained)
        if isinstance(found, Found):
            plan = _located(found.payload, found.path)
            violation = plan.violation()
            return (None, violation) if violation else (plan, "")
        return None, str(found)

    def find(self, mode: str) -> tuple[Plan | None, str]:
        """The stored plan if the mode allows one, or None and the reason.

        Mode `replay` ignores a plan without transforms whose search ran out of time if the budget
        is now at least `LONGER` times as long.

        Args:
            mode: `replay`, `tune` or `strict`; see `tune`.

        Raises:
            PlanError: mode is `strict`, and no plan is stored.
        """
        plan, reason = (None, "") if mode == "tune" else self.look_up()
        if plan is None and mode == "strict":
            raise PlanError(f"no stored plan for {self.workload.name}: {reason}")
        if plan is not None and mode == "replay" and (reason := self._cut_short(plan)):
            return None, reason
        return plan, reason

    def _cut_short(self, plan: Plan) -> str:
        """Why to repeat the plan's search with the current budget; empty if not needed."""
        evidence = plan.evidence
        if not _is_unfinished(plan):
            return ""
        if self.options.budget_s < LONGER * evidence.search_s:
            return ""
        return (
            f"in {evidence.search_s:.0f} s, an earlier search found nothing faster: looking again"
        )

    def find_or_search(self, mode: str, watcher: ProgressListener | None = None) -> Plan:
        """The stored plan, or one that a search finds and stores.

        Args:
            mode: as for `find`.
            watcher: receives the progress of the search.

        Raises:
            PlanError: mode is `strict`, and no plan is stored.
            KeyboardInterrupt: interrupted by the user; the workers have ended.
        """
        plan, _ = self.find(mode)
        return self.search_and_keep(watcher, anew=mode == "tune") if plan is None else plan

    def search_and_keep(
        self, watcher: ProgressListener | None = None, *, anew: bool = False
    ) -> Plan:
        """Searches, and stores the plan; see `search` and `keep`.

        Raises:
            KeyboardInterrupt: interrupted by the user; the workers have ended.
        """
        result = self.search(watcher)
        if result.interrupted:
            raise KeyboardInterrupt
        return self.keep(result, anew=anew)

    def search(self, watcher: ProgressListener | None = None) -> TuneResult:
        """Searches within the budget, with each candidate in its own worker process.

        On Ctrl-C, returns the partial result with `interrupted` set.

        Raises:
            UsageError: the untouched workload fails, it updates batch statistics when called, or
                the budget is too small to measure it.
        """
        began, watcher, options = time.monotonic(), watcher or NullListener(), self.options
        if (reason := objection(self.workload)) is not None:
            raise UsageError(reason)
        self._store.check(self.key)
        reserved_s = reserve_s(self._device, options.budget_s)
        options = msgspec.structs.replace(options, budget_s=options.budget_s - reserved_s)
        with ExitStack() as at_the_end:
            server = self._take_server()
            at_the_end.callback(server.close)
            directory = server.directory
            launch = WorkerLauncher(
                directory,
                self._memory_limit(),
                server.environment,
                [*serialization.modules_of(self.workload), *self._imports()],
                server.fork_server,
            )
            scheduler = SetupScheduler(
                launch,
                self._device if self._devices is None else self._devices.names[0],
                self._ambient,
                options,
                watcher,
                self._has_spare_cores(),
                others=() if self._devices is None else self._devices.names[1:],
                runs_on=self._runs_on,
            )
            if self._devices is not None:
                scheduler.left_out |= self._devices.left_out
            at_the_end.callback(scheduler.kill_all)
            scheduler.start()
            save_payload(self.workload, directory)
            making = host.begin() if self._compiles_host_code() else None
            if making is not None:
                at_the_end.callback(making.stop)
            available, not_applicable = self.options_that_apply()
            engines = None
            if any(spec.name == ENGINES for spec in available):
                from steadytorch.tune.conv import start_chooser

                forks = server.fork_server
                worker = start_chooser(directory, self._device, self._ambient, forks)
                at_the_end.callback(worker.kill)
                engines = partial(self._engines, worker, scheduler.pump_until)
            result = Search(
                self.workload,
                scheduler,
                available=available,
                not_applicable=not_applicable,
                options=options,
                watcher=watcher,
                slots=self._slots(),
                choose_engines=engines,
                pads=lambda: compiler_choices.within(directory).pads,
                began=began,
            ).run()
            self._converted = artefact.held(directory, transforms.artefacts(result.chosen))
            if not result.interrupted:
                with suppress(KeyboardInterrupt):  # the result is complete
                    if reserved_s:
                        compile_now(reserved_s + _FINISH_S, watcher)
                    elif making is not None:
                        making.finish(_FINISH_S)
            return result

    def _take_server(self) -> SearchServer:
        """The server that was started in advance if it still fits, else a new one."""
        early, self._server = self._server, None
        cores, devices = self.facts.cores_logical, self._device_count()
        if early is not None:
            if early.fits(cores, devices):
                return early
            early.close()
        return SearchServer(cores, devices)

    def _engines(
        self,
        worker: Worker,
        wait: Callable[[Worker, float], Any],
        prefix: Candidate,
        seconds: float,
    ) -> str:
        from steadytorch.tune.conv import choose_and_keep

        report = choose_and_keep(
            self.workload,
            self.facts,
            self._store,
            prefix=prefix,
            device=self._device,
            deadline_s=seconds,
            # bf16 allows more error than fp16 makes, and `headroom` checks fp16's range.
            # Not for training, since gradients have another range.
            other_half=half_of(self.options.precision) == "bf16" and not self.workload.is_training,
            worker=worker,
            wait=wait,
        )
        return report.choices

    def keep(self, result: TuneResult, anew: bool = False) -> Plan:
        """Makes a plan from a complete search and stores it, in memory if the disk is not writable.

        Args:
            result: result of the search.
            anew: whether to replace a stored plan; one with a gain stays if this search found none
                before its time was over. Otherwise a plan that another process stored
                meanwhile is kept and returned, so that concurrent searches share one plan.
        """
        plan = self._plan(result.chosen, result.evidence(), result.compiler)
        kept = self._stored(plan, anew)
        converted, self._converted = self._converted, None
        if converted is not None and kept.candidate == result.chosen:
            converted.keep_beside(kept.path)
        return kept

    def _stored(self, plan: Plan, anew: bool) -> Plan:
        if anew and not _is_unfinished(plan):
            return _located(plan, self._store.put(self.key, plan))
        stored = self._store.add(self.key, plan)
        there = _located(stored.payload, stored.path)
        serves = there.candidate or not anew
        if serves and there.violation() is None and not self._cut_short(there):
            return there
        return _located(plan, self._store.put(self.key, plan))

    def adopt(self, plan: Plan) -> Plan:
        """Stores a plan that another rank had, in place of this rank's own."""
        return _located(plan, self._store.put(self.key, plan))

    def untouched(self, reason: str) -> Plan:
        """A plan that leaves the workload untouched.

        The plan is not stored, because nothing was measured.
        """
        unmeasured = Timing(self.options.objective, 0.0, None, 0.0, None, 0)
        evidence = Evidence(
            baseline=unmeasured,
            winner=unmeasured,
            speedup=Speedup(1.0, None, None, "process", "untouched", 0),
            break_even_calls=None,
            regime="not measured",
            reference="not measured",
            trials=(),
            not_applicable={},
            not_tried={"all": reason},
            search_s=0.0,
        )
        return self._plan((), evidence)

    def keep_bundle(self, plan: Plan) -> str | None:
        """Builds the plan's bundle; returns None or why it failed. See `bundle.keep_bundle`."""
        return keep_bundle(plan, self.workload, self._device)

    def _plan(
        self,
        candidate: Candidate,
        evidence: Evidence,
        compiler: CompilerChoices = CompilerChoices(),  # noqa: B008  # immutable
    ) -> Plan:
        workload = self.workload
        return Plan(
            name=workload.name,
            signature=self._signature,
            candidate=candidate,
            evidence=evidence,
            key=self.key,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            version=__version__,
            trains=trained_fingerprint(workload.untouched) if workload.is_training else None,
            libraries=transforms.libraries(candidate),
            compiler=compiler,
        )

    def options_that_apply(self) -> tuple[list[TransformSpec], dict[str, str]]:
        """All transforms that apply to the workload, and the reasons by name why others do not."""
        available: list[TransformSpec] = []
        refused: dict[str, str] = {}
        admit()
        for transform in transforms.all_variants(self.facts):
            try:
                answer = transform.applies_to(self.workload, self.facts)
            except Exception as error:  # of a plug-in, which costs its own candidates only
                if transform.name in transforms.names():
                    raise
                answer = NotApplicable(f"its own check failed: {one_line(error)}")
            if isinstance(answer, NotApplicable):
                refused[str(transform.spec)] = answer.reason
            else:
                available.append(transform.spec)
        told = {name: f"plug-in refused: {why}" for name, why in plugins.refused().items()}
        return available, refused | told

    def _slots(self) -> int:
        """Number of set-ups that may overlap: one per core, at most eight per device."""
        return set_ups_at_once(self.facts.cores_logical, self._device_count())

    def _device_count(self) -> int:
        return 1 if self._devices is None else len(self._devices.names)

    def _has_spare_cores(self) -> bool:
        """Whether the host has cores to spare for work beside the untouched workload."""
        return self._slots() >= 4

    def _imports(self) -> list[str]:
        """Names of modules that the verification of a training step imports."""
        return ["scipy.stats"] if self.workload.is_training else []

    def _compiles_host_code(self) -> bool:
        """Whether to compile host code in the background: on a GPU host with cores to spare."""
        return torch.device(self._device).type == "cuda" and self._has_spare_cores()

    def _memory_limit(self) -> int:
        """Host memory limit per worker in bytes: 80 % of the memory available now."""
        return int(0.8 * psutil.virtual_memory().available)


def objection(workload: Workload) -> str | None:
    """Why an inference workload cannot be tuned and what to do; None if it can."""
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.dropout import _DropoutNd

    if workload.is_training or workload.module is None:
        return None
    for name, module in workload.module.named_modules():
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            why = "each call updates the statistics of"
        elif isinstance(module, _DropoutNd) and module.training and module.p > 0:
            why = "outputs cannot be verified, because of the random numbers of"
        else:
            continue
        return (
            f"{workload.name} is in training mode, where {why} {name or type(module).__name__}: "
            "call model.eval() first, or pass Workload.training(...) to tune its steps"
        )
    return None


def _is_unfinished(plan: Plan) -> bool:
    """Whether the search found nothing faster before its budget was exhausted."""
    evidence = plan.evidence
    left = [*evidence.not_tried.values(), *(trial.reason or "" for trial in evidence.trials)]
    return not plan.candidate and any(reason.endswith(EXHAUSTED) for reason in left)


def _located(plan: Plan, path: Path | None) -> Plan:
    return msgspec.structs.replace(plan, path=None if path is None else os.fspath(path))


def tune(
    workload: Workload | tuple[Any, Any],
    *,
    objective: str = "auto",
    precision: str = "same",
    tolerance: float | None = None,
    budget: str | float = "3m",
    max_memory: str | int | None = None,
    device: str | None = None,
    devices: str | Sequence[str] | None = None,
    store: str | Path | None = None,
    mode: str = "replay",
    seed: int = 0,
    bundle: bool = False,
    watcher: ProgressListener | None = None,
    agree: bool = True,
    group: Any = None,
) -> Plan:
    """Finds, verifies and stores the fastest steady plan for a workload.

    Args:
        workload: the workload or its `(model, inputs)`; neither run in this process nor changed.
        objective: `auto`, `latency`, `p99`, `throughput` or `contended`; see `SearchOptions`.
        precision: lowest precision class allowed: `same`, `tf32`, `bf16`, `fp16` or `int8`.
        tolerance: relative L2 error allowed for a lower precision; None for the class's default.
        budget: wall-clock time of the search, such as `"3m"`, `"90s"` or seconds.
        max_memory: cap on a plan's peak memory, such as `"8GiB"` or bytes.
        device: where to run; None for the workload's device.
        devices: GPUs of one kind that share the search, such as `["cuda:0", "cuda:1"]`; `"all"` for
            all idle ones of the kind of `device`; None for `device` alone. Candidates are raced on
            several GPUs at once, each against the untouched workload on its own GPU. The plan is
            confirmed on the GPU of the leader.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.
        mode: `replay` returns a stored plan, or searches if there is none; `tune` always searches;
            `strict` only returns a stored plan.
        seed: seed of the verification inputs and the block order.
        bundle: whether to store the plan's compiled code beside it. It is loaded only with
            `bundle=True` in `optimize` or `apply`.
        watcher: receives the progress of the search.
        agree: whether the ranks of an initialised process group get one plan, found or searched
            by one of them; see `docs/ranks.md`. Call this on every rank then.
        group: the process group whose ranks agree; None for the default group.

    Returns:
        The plan. Its candidate is empty if nothing beat the untouched workload, or if ranks did
        not agree; then `evidence.not_tried` has the reason.

    Raises:
        PlanError: mode is `strict` and no plan is stored, or ranks did not agree.
        UsageError: an argument is wrong, the untouched workload fails, or the budget is too small.
        UnsupportedError: a device does not exist.
        KeyboardInterrupt: interrupted by the user; the workers have ended.
    """
    options = SearchOptions(
        objective=objective,
        precision=precision,
        tolerance=tolerance,
        budget_s=parse_duration(budget),
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory),
        seed=seed,
    )
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r:.60}: choose one of {', '.join(MODES)}")
    workload = workload_of(workload)
    chosen = None
    if devices is not None:
        chosen = choose_devices(devices, device, str(workload.device))
        for note in chosen.notes:
            log.warning("%s", note)
    session = Session(workload, options, device, store, devices=chosen)
    ranks = ranks_of(group, agree)
    if ranks is None:
        plan = session.find_or_search(mode, watcher)
    else:
        plan = agree_on_plan(session, mode, watcher, ranks)
    if bundle:
        session.keep_bundle(plan)
    return plan


def agree_on_plan(
    session: Session, mode: str, watcher: ProgressListener | None, ranks: Ranks
) -> Plan:
    """One plan for all ranks; the leading rank searches if no rank has a plan."""
    plan = None if mode == "tune" else session.look_up()[0]

    def search(gpus: tuple[str, ...]) -> Plan:
        session.share(gpus)
        return session.search_and_keep(watcher, anew=mode == "tune")

    proposed = agreed.propose(
        ranks,
        session.key,
        plan,
        Plan,
        mode=mode,
        problem=collective_in(session.workload.untouched),
        violation=Plan.violation,
        search=None if mode == "strict" else search,
        gpu=session.gpu,
    )
    reason = proposed if isinstance(proposed, Refusal) else proposed.confirm(None)
    if isinstance(reason, Refusal):
        reason = agreed.told(reason)
    if reason is not None:
        if mode == "strict":
            raise PlanError(f"no plan for {session.workload.name}: {reason}")
        return session.untouched(reason)
    assert isinstance(proposed, agreed.Proposed)
    return session.adopt(proposed.plan) if proposed.is_new else proposed.plan
