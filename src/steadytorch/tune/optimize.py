"""Serves a stored plan for each input signature at run time, or searches for missing plans."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn

from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.errors import SteadyError, UsageError
from steadytorch.plan.fingerprint import Key, workload_fingerprint
from steadytorch.plan.store import Store
from steadytorch.process.job_queue import JobQueue
from steadytorch.quantities import parse_bytes, parse_duration
from steadytorch.ranks.agreement import Refusal
from steadytorch.ranks.group import Ranks, collective_in, ranks_of
from steadytorch.runtime.buckets import Buckets
from steadytorch.runtime.churn import WITHHELD, ChurnGuard
from steadytorch.runtime.dispatch import NO_PLAN, CallContext, Resolution
from steadytorch.runtime.entries import ServingOptions, parse_verify_every
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.module_proxy import Function, as_module
from steadytorch.runtime.weights import Weights
from steadytorch.serve import agreed
from steadytorch.serve.plan import Plan
from steadytorch.transforms import compiles
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session, objection
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

MODES = ("replay", "tune", "strict", "off")
TRAINING = "the model is in training mode"
SEARCHING = "the search for its plan is running"
OCCUPIED = "another search or bundle build is running"
FAILED = "the search for its plan failed"
NO_PLAN_AT_ALL = "the store has no plan for this model"
QUIET_S = 30.0
"""Seconds without a search before a bundle is built. New signatures tend to come in a row, and
building a bundle would delay their searches."""


def optimize(
    model: nn.Module,
    mode: str = "replay",
    *,
    store: str | Path | None = None,
    objective: str = "auto",
    precision: str = "same",
    tolerance: float | None = None,
    budget: str | float = "3m",
    max_memory: str | int | None = None,
    background: bool = False,
    buckets: Mapping[str, Any] | None = None,
    canary: bool = True,
    verify_every: int | None = None,
    alias_outputs: bool = False,
    bundle: bool = False,
    seed: int = 0,
    agree: bool = True,
    group: Any = None,
) -> TunedModule:
    """Returns a module that runs `model` with a tuned plan for each input signature.

    Each input signature is looked up once, in memory and then in the store. Signatures without a
    plan run untouched; in mode `tune`, a search for a plan runs first. With the environment
    variable `STEADYTORCH_MODE=off`, every call runs the untouched model.

    Args:
        model: the untouched model, on its device, in evaluation mode. A callable that is not an
            `nn.Module` runs untouched.
        mode: `replay` serves stored plans; `tune` also searches for missing ones, if signatures
            repeat often enough to pay; `strict` raises if a plan is missing; `off` runs the model
            untouched.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.
        objective: `auto`, `latency`, `p99`, `throughput` or `contended`; see `SearchOptions`.
        precision: how far numerics may move: `same`, `tf32`, `bf16`, `fp16` or `int8`.
        tolerance: relative L2 error allowed for a lower precision; None for the class's default.
        budget: wall-clock time of each search, such as `"3m"`, `"90s"` or seconds.
        max_memory: cap on a plan's peak memory, such as `"8GiB"` or bytes.
        background: whether to search in a thread while the untouched model serves. Otherwise the
            first call of a signature waits for its search. Candidates always run in worker
            processes.
        buckets: input dimensions that may be padded, such as `{"batch": [1, 8, 32]}`; then only
            the padded signatures have plans.
        canary: whether to verify and time the first calls of each plan against the untouched
            model on the real inputs; a plan that is wrong or slower is dropped.
        verify_every: number of calls of a signature after which one is also run on the untouched
            model; a plan whose outputs differ is dropped. None for never.
        alias_outputs: whether outputs may be buffers that the next call overwrites.
        bundle: whether to load a plan's stored compiled code, and to store it after a search, in a
            background thread. Loading runs code: see `compiled.bundle` for what is accepted.
        seed: seed of the verification inputs and the block order.
        agree: whether the ranks of an initialised process group serve a plan only if all of them
            can; see `docs/ranks.md`. Every rank must then call the module for the same signatures
            in the same order.
        group: the process group whose ranks agree; None for the default group.

    Returns:
        A module with the call signature, attributes and state of `model`.

    Raises:
        UsageError: `model` cannot be called, or an argument is wrong.
    """
    if isinstance(model, TunedModule):
        raise UsageError("optimize takes an untouched model, got a tuned one: pass the original")
    if not isinstance(mode, str):
        raise UsageError(
            f"optimize takes mode as a string, got a {type(mode).__name__}: pass inputs to the "
            "returned module, as in optimize(model)(inputs)"
        )
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    module = as_module(model)
    if mode == "strict" and isinstance(module, Function):
        raise UsageError(f"mode strict cannot serve a {type(model).__name__}: {module.reason}")
    asked = SearchOptions(
        objective=objective,
        precision=precision,
        tolerance=tolerance,
        budget_s=parse_duration(budget),
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory),
        seed=seed,
    ).resolved(is_training=False)
    if tolerance is not None and precision == "same":
        raise UsageError(
            f"tolerance {tolerance} needs a lower precision than same: choose tf32, bf16, fp16 or "
            "int8"
        )
    serving = ServingOptions(
        alias_outputs,
        None if buckets is None else Buckets(buckets, module),
        canary,
        strict=mode == "strict",
        verify_every=parse_verify_every(verify_every),
    )
    ranks = ranks_of(group, agree)
    if ranks is not None and background and mode == "tune":
        raise UsageError(
            "background searches cannot be agreed on by ranks: pass background=False or agree=False"
        )
    source = PlanSource(asked, mode, store, background, bundle, ranks)
    return TunedModule(module, source, partial(_why_off, mode=mode), serving)


def _why_off(model: nn.Module, mode: str) -> str | None:
    if mode == "off":
        return "mode is off"
    return model.reason if isinstance(model, Function) else None


class PlanSource:
    """Finds the plan for a call in the store, or by a search in mode `tune`.

    Args:
        options: the search options.
        mode: replay, tune or strict.
        store: folder of the plan store; None for the default one.
        background: whether searches run in a thread.
        bundle: whether plans are served with their bundles.
        ranks: the ranks that must agree on each plan; None for this process alone.
    """

    def __init__(
        self,
        options: SearchOptions,
        mode: str,
        store: str | Path | None,
        background: bool,
        bundle: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._bundle, self._ranks = bundle, ranks
        # Set for good when a rank was missing, so that each new signature does not wait for it.
        self._absence: str | None = None
        # One store for all signatures: it keeps unwritable plans in memory and warns once.
        self._options, self._mode, self._store = options, mode, Store(store)
        self._guard = ChurnGuard()
        self._searches = JobQueue("steadytorch-search") if background else None
        self._bundles = JobQueue("steadytorch-bundle")
        # Held by searches and bundle builds, which would disturb each other's timing.
        self._alone = Lock()
        self._searched_at = 0.0
        self._found: dict[Any, Resolution] = {}
        self._model: _Described | None = None

    def __call__(self, context: CallContext) -> Resolution:
        """Decides whether a plan or the untouched model serves these inputs.

        Raises:
            KeyboardInterrupt: a search was interrupted; its workers are gone.
        """
        if context.model.training:
            return Resolution(None, TRAINING)
        workload = Workload(context.model, context.args, context.kwargs)
        if self._model is None or self._model.is_outdated(workload):
            self._model = _Described(workload)
        try:
            session = Session(
                workload,
                self._options,
                self._model.device,
                self._store,
                facts=self._model.facts,
                fingerprint=self._model.fingerprint,
                signature=context.signature,
            )
        except SteadyError as error:
            return Resolution(None, NO_PLAN, str(error))
        if self._ranks is not None:
            return self._together(session, self._ranks, self._model.objection)
        if self._model.objection is not None:
            return Resolution(None, NO_PLAN, self._model.objection)
        plan, said = session.look_up(explained=False)
        if plan is not None:
            return plan.resolution(self._bundle)
        if self._mode == "tune":
            return self._tuned(session)
        reason = said or partial(self._why_missed, session.key)
        if self._mode == "replay" and not self._store.has_any(session.key.workload):
            return Resolution(None, NO_PLAN_AT_ALL, reason, for_all=True)
        return Resolution(None, NO_PLAN, reason)

    def _together(self, session: Session, ranks: Ranks, objection: str | None) -> Resolution:
        """The plan that all ranks agree to serve for these inputs."""
        if self._absence is not None:
            return Resolution(None, self._absence)
        plan = None if objection else session.look_up(explained=False)[0]
        if objection is None and (plan is None or plan.candidate):
            objection = collective_in(session.workload.untouched)
        proposed = agreed.propose(
            ranks,
            session.key,
            plan,
            Plan,
            mode=self._mode,
            problem=objection,
            violation=Plan.violation,
            search=partial(self._search_of_leader, session) if self._mode == "tune" else None,
            gpu=session.gpu,
        )
        if isinstance(proposed, Refusal):
            reason = agreed.told(proposed)
            if proposed.is_absence:
                self._absence = reason
            return Resolution(None, reason)
        chosen = session.adopt(proposed.plan) if proposed.is_new else proposed.plan
        if chosen.candidate:
            return replace(chosen.resolution(self._bundle), confirm=proposed.confirm)
        reason = proposed.confirm(None)
        return chosen.resolution(self._bundle) if reason is None else Resolution(None, reason)

    def _search_of_leader(self, session: Session, gpus: tuple[str, ...]) -> Plan | str:
        if self._guard.observe(session.key.digest) is not None:
            return f"{WITHHELD}: {self._guard.why}"
        session.share(gpus)
        try:
            return session.search_and_keep()
        except SteadyError as error:
            return f"{FAILED}: {error}"

    def _why_missed(self, key: Key) -> str:
        return str(self._store.nearest(key))

    def _tuned(self, session: Session) -> Resolution:
        key = session.key.digest
        found = self._found.pop(key, None)
        if found is not None:  # a background search has ended
            return found
        if self._guard.observe(key) is not None:
            return Resolution(
                None,
                WITHHELD,
                self._guard.why,
                again=lambda: self._guard.observe(key) is None,
            )
        if self._searches is None:
            return self._searched_now(session)
        # The caller may write to its inputs during the search.
        session.workload = _with_own_inputs(session.workload)

        def search() -> None:
            with self._alone:
                self._found[key] = self._search(session)

        done = self._searches.start(search)
        return Resolution(None, SEARCHING, again=done.is_set)

    def _searched_now(self, session: Session) -> Resolution:
        if not self._alone.acquire(blocking=False):
            return Resolution(None, OCCUPIED, again=lambda: not self._alone.locked())
        try:
            return self._search(session)
        finally:
            self._alone.release()

    def _search(self, session: Session) -> Resolution:
        try:
            plan = session.search_and_keep()
        except SteadyError as error:
            return Resolution(None, FAILED, str(error))
        except Exception as error:
            return Resolution(None, FAILED, f"{type(error).__name__}: {error}")
        self._searched_at = time.monotonic()
        if self._bundle and compiles(plan.candidate):
            # Takes about a minute beyond the budget; until then the plan runs without it.
            session.workload = _with_own_inputs(session.workload)
            self._bundles.start(lambda: self._keep_bundle(session, plan))
        served = plan.resolution(self._bundle)
        saved_ns = 0.0 if served.origin is None or not plan.candidate else served.origin.saved_ns
        self._guard.paid(plan.evidence.search_s, 1e-9 * saved_ns)
        return served

    def _keep_bundle(self, session: Session, plan: Plan) -> None:
        while True:
            while time.monotonic() < self._searched_at + QUIET_S:
                time.sleep(0.1)  # a long sleep would delay the end of the process
            with self._alone:
                if time.monotonic() >= self._searched_at + QUIET_S:
                    session.keep_bundle(plan)
                    return


class _Described:
    """Parts of a plan's key that take milliseconds to compute, cached per model and device.

    Attributes:
        device: the model's device.
        facts: facts about the device.
        fingerprint: fingerprint of the model.
        objection: why the model cannot have a plan, or None.
    """

    def __init__(self, workload: Workload) -> None:
        self._weights = Weights(workload.model)
        self._weights.remember()
        self._device = workload.device
        self.device = str(self._device)
        self.facts = load_facts(resolve_device(self.device))
        self.fingerprint = workload_fingerprint(workload)
        self.objection = objection(workload)

    def is_outdated(self, workload: Workload) -> bool:
        """Whether the model or its device has changed since the parts were cached."""
        return self._device != workload.device or self._weights.changed()


def _with_own_inputs(workload: Workload) -> Workload:
    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    inputs, kwargs = map_tensors(own, (workload.inputs, dict(workload.kwargs)))
    return Workload(workload.model, inputs, kwargs, workload.name)
