"""Benchmark mode at run time: per input shape a stored plan, or a search on first sight."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import nn

from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.errors import SteadyError, UsageError
from steadytorch.plan.fingerprint import Key, workload_fingerprint
from steadytorch.plan.store import Store
from steadytorch.quantities import parse_bytes, parse_duration
from steadytorch.runtime.buckets import Buckets
from steadytorch.runtime.churn import WITHHELD, ChurnGuard
from steadytorch.runtime.dispatch import NO_PLAN, Arrival, Resolution
from steadytorch.runtime.entries import Options as Serving
from steadytorch.runtime.entries import parse_verify_every
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.standin import Function, as_module
from steadytorch.runtime.weights import Weights
from steadytorch.serve.plan import Plan
from steadytorch.transforms import compiles
from steadytorch.tune.select import Options
from steadytorch.tune.session import Session, objection
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

MODES = ("replay", "tune", "strict", "off")
TRAINING = "the model is in training mode"
SEARCHING = "its plan is being searched for"
OCCUPIED = "another plan is being searched for, or its bundle made"
FAILED = "the search for a plan failed"
NO_PLAN_AT_ALL = "the store has no plan for this model"
QUIET_S = 30.0
"""Seconds without a search before a bundle is made: signatures tend to be new one after another,
and a search would have to wait for it."""

_log = logging.getLogger("steadytorch")


def optimize(
    model: nn.Module,
    mode: str = "replay",
    *,
    store: str | Path | None = None,
    objective: str = "latency",
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
) -> TunedModule:
    """A module that serves `model` by the plans for it: benchmark mode for the whole model.

    Each signature of inputs is looked up once: in memory, then in the store. What has no plan runs
    untouched; in mode `tune` it is searched for a plan first. The environment variable
    `STEADYTORCH_MODE=off` leaves everything untouched.

    Args:
        model: the untouched model, on the device it is to run on, in evaluation mode. A callable
            that is no `nn.Module` runs untouched.
        mode: `replay` serves stored plans; `tune` also searches where there is none, as long as
            signatures repeat often enough for that to pay; `strict` raises where there is none;
            `off` runs the model untouched.
        store: folder of the plan store; None for `~/.cache/steadytorch/plans`.
        objective: `latency`, `p99` or `throughput`.
        precision: how far numerics may move: `same`, `tf32`, `bf16` or `fp16`.
        tolerance: relative L2 error allowed for a lower precision; None for the class's default.
        budget: wall-clock time of each search, such as `"3m"`, `"90s"` or seconds.
        max_memory: cap on a plan's peak memory, such as `"8GiB"` or bytes.
        background: whether to search in a thread, the untouched model serving meanwhile; otherwise
            the first call of a signature waits for its search. Either way candidates run in worker
            processes.
        buckets: dimensions of the inputs that may be padded, such as `{"batch": [1, 8, 32]}`; only
            the padded signatures have plans then.
        canary: whether the first calls of each plan are checked and timed against the untouched
            model, on the real inputs; a plan that is wrong or slower is not served.
        verify_every: every so many calls of a signature one is answered by the untouched model as
            well; a plan whose answer differs is not served again. None for never.
        alias_outputs: whether outputs may be buffers that the next call overwrites.
        bundle: whether to load what a plan compiled when it was made, where it is kept, and to keep
            it after a search, which is done in a thread. It is code, which runs: see `plan.bundle`
            for what is accepted.
        seed: of verification inputs and block order.

    Returns:
        A module with the call signature, attributes and state of `model`.

    Raises:
        UsageError: `model` cannot be called, or an argument is wrong.
    """
    if isinstance(model, TunedModule):
        raise UsageError("optimize takes the untouched model, got a tuned one: pass what it wraps")
    if not isinstance(mode, str):
        raise UsageError(
            f"optimize takes the mode as text, got a {type(mode).__name__}: pass inputs to the "
            "module that it returns, as in optimize(model)(inputs)"
        )
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    module = as_module(model)
    if mode == "strict" and isinstance(module, Function):
        raise UsageError(f"mode strict cannot serve a {type(model).__name__}: {module.reason}")
    asked = Options(
        objective=objective,
        precision=precision,
        tolerance=tolerance,
        budget_s=parse_duration(budget),
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory),
        seed=seed,
    )
    if tolerance is not None and precision == "same":
        raise UsageError(
            f"tolerance {tolerance} with precision same: name a lower precision to use a tolerance"
        )
    serving = Serving(
        alias_outputs,
        None if buckets is None else Buckets(buckets, module),
        canary,
        strict=mode == "strict",
        verify_every=parse_verify_every(verify_every),
    )
    source = PlanSource(asked, mode, store, background, bundle)
    return TunedModule(module, source, partial(_why_off, mode=mode), serving)


def _why_off(model: nn.Module, mode: str) -> str | None:
    if mode == "off":
        return "mode is off"
    return model.reason if isinstance(model, Function) else None


class PlanSource:
    """Finds the plan for an arrival: in the store, else by a search where the mode says so.

    Args:
        options: what is asked of plans.
        mode: replay, tune or strict.
        store: folder of the plan store; None for the default one.
        background: whether searches run in a thread.
        bundle: whether plans are served with their bundles.
    """

    def __init__(
        self,
        options: Options,
        mode: str,
        store: str | Path | None,
        background: bool,
        bundle: bool = False,
    ) -> None:
        self._bundle = bundle
        # One for all signatures: what cannot be written is kept in it, and said once.
        self._options, self._mode, self._store = options, mode, Store(store)
        self._guard = ChurnGuard()
        self._searches = _Queue("steadytorch-search") if background else None
        self._bundles = _Queue("steadytorch-bundle")
        # Held by a search and by the making of a bundle: each would disturb what others measure.
        self._alone = Lock()
        self._searched_at = 0.0
        self._found: dict[Any, Resolution] = {}
        self._model: _Described | None = None

    def __call__(self, arrival: Arrival) -> Resolution:
        """What serves these inputs.

        Raises:
            KeyboardInterrupt: a search was interrupted; its workers are gone.
        """
        if arrival.model.training:
            return Resolution(None, TRAINING)
        workload = Workload(arrival.model, arrival.args, arrival.kwargs)
        if self._model is None or self._model.is_outdated(workload):
            self._model = _Described(workload)
        if self._model.objection is not None:
            return Resolution(None, NO_PLAN, self._model.objection)
        try:
            session = Session(
                workload,
                self._options,
                self._model.device,
                self._store,
                facts=self._model.facts,
                fingerprint=self._model.fingerprint,
                signature=arrival.signature,
            )
        except SteadyError as error:
            return Resolution(None, NO_PLAN, str(error))
        plan, said = session.look_up(explained=False)
        if plan is not None:
            return plan.resolution(self._bundle)
        if self._mode == "tune":
            return self._tuned(session)
        reason = said or partial(self._why_missed, session.key)
        if self._mode == "replay" and not self._store.has_any(session.key.workload):
            return Resolution(None, NO_PLAN_AT_ALL, reason, for_all=True)
        return Resolution(None, NO_PLAN, reason)

    def _why_missed(self, key: Key) -> str:
        return str(self._store.nearest(key))

    def _tuned(self, session: Session) -> Resolution:
        key = session.key.digest
        found = self._found.pop(key, None)
        if found is not None:  # by a search in the background that has ended
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
        # The caller may write to its inputs while the search is on.
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
            result = session.search()
            if result.interrupted:
                raise KeyboardInterrupt
            plan = session.keep(result)
        except SteadyError as error:
            return Resolution(None, FAILED, str(error))
        except Exception as error:
            return Resolution(None, FAILED, f"{type(error).__name__}: {error}")
        self._searched_at = time.monotonic()
        if self._bundle and compiles(plan.candidate):
            # It takes about a minute, beyond the budget; until it is there the plan does without.
            session.workload = _with_own_inputs(session.workload)
            self._bundles.start(lambda: self._keep_bundle(session, plan))
        served = plan.resolution(self._bundle)
        saved_ns = 0.0 if served.origin is None or not plan.candidate else served.origin.saved_ns
        self._guard.paid(plan.evidence.search_s, 1e-9 * saved_ns)
        return served

    def _keep_bundle(self, session: Session, plan: Plan) -> None:
        while True:
            time.sleep(max(0.0, self._searched_at + QUIET_S - time.monotonic()))
            with self._alone:
                if time.monotonic() >= self._searched_at + QUIET_S:
                    session.keep_bundle(plan)
                    return


class _Described:
    """What of a key belongs to the model and the machine; finding it takes milliseconds.

    Attributes:
        device: the model's.
        facts: of it.
        fingerprint: of the model.
        objection: why there can be no plan for it, or None.
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
        """Whether the model or its device changed since."""
        return self._device != workload.device or self._weights.changed()


def _with_own_inputs(workload: Workload) -> Workload:
    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    inputs, kwargs = map_tensors(own, (workload.inputs, dict(workload.kwargs)))
    return Workload(workload.model, inputs, kwargs, workload.name)


class _Queue:
    """One job after another, in a thread that ends when there is none left.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Event]] = SimpleQueue()
        self._lock = Lock()
        self._is_running = False

    def start(self, job: Callable[[], Any]) -> Event:
        """Queues a job; the event is set when it is over."""
        done = Event()
        with self._lock:
            self._waiting.put((job, done))
            if not self._is_running:
                self._is_running = True
                # The process may end meanwhile: workers end with it.
                Thread(target=self._run, name=self._name, daemon=True).start()
        return done

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._waiting.empty():
                    self._is_running = False
                    return
                job, done = self._waiting.get()
            try:
                job()
            except BaseException as error:  # the thread serves those that wait
                _log.warning("%s ended: %s", self._name, type(error).__name__)
            finally:
                done.set()
