"""Dispatches each call by its arguments to an executor or to the untouched model.

The fast path is written for speed; its counters take no lock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import msgspec
from torch import is_grad_enabled, nn
from torch._C import (
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _set_grad_enabled,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from steadytorch.ambient import has_function_mode, in_force
from steadytorch.compiled.artefact import Shelf
from steadytorch.compiled.compiler_choices import NONE, Choices
from steadytorch.compiled.prebuilt import Source
from steadytorch.errors import UnsupportedError
from steadytorch.results.candidate import Candidate, describe
from steadytorch.results.signature import Signature
from steadytorch.runtime.executors import Executor
from steadytorch.runtime.keys import needs_gradient, quick_key
from steadytorch.runtime.probation import CanaryProbation, FirstCall
from steadytorch.runtime.report import Serving
from steadytorch.runtime.settings import needed
from steadytorch.runtime.smoke_check import TrainingSmokeCheck
from steadytorch.workload.containers import BorrowedArguments

NO_PLAN = "no plan for these inputs"
RECONSIDERED_S = 10.0
"""Seconds between look-ups for a model that has no plan."""
NEEDS_GRADIENT = "an input requires gradients"
NOT_FASTER = "nothing was faster than the untouched model"


class CallContext(NamedTuple):
    """The first call with a signature: the model and its arguments."""

    model: nn.Module
    signature: Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Origin(msgspec.Struct, frozen=True):
    """The plan that a candidate comes from, and its measured gain.

    Attributes:
        plan: the plan's id.
        saved_ns: measured time saved per call against the untouched model, in ns.
        break_even_calls: calls after which set-up is paid back; None if unknown.
        tolerance: allowed relative L2 error; None for the default of the plan's precision.
    """

    plan: str
    saved_ns: float
    break_even_calls: int | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Resolution:
    """How to serve calls with one signature.

    Attributes:
        candidate: the transforms to apply; None without a plan, empty if the plan is to leave the
            model untouched.
        reason: why the model runs untouched; a fixed text, by which calls are counted.
        detail: details of the reason for the log and the report; a function if they change.
        origin: the plan that the candidate comes from.
        again: polled on later untouched calls; True resolves again.
        prebuilt: compiled code that the `compile` transform loads instead of compiling.
        shelf: where engines find the converted model.
        choices: what `compile` is to choose without timing.
        for_all: whether this resolution holds for all inputs, for `RECONSIDERED_S` seconds.
        confirm: called once before the executor serves, with the reason if it could not be built;
            returns why it must not serve, or None.
    """

    candidate: Candidate | None
    reason: str = NO_PLAN
    detail: str | Callable[[], str] = ""
    origin: Origin | None = None
    again: Callable[[], bool] | None = None
    prebuilt: Source | None = None
    shelf: Shelf | None = None
    choices: Choices = NONE
    for_all: bool = False
    confirm: Callable[[str | None], str | None] | None = None


Resolver = Callable[[CallContext], Resolution]
"""Resolves a signature. Must not call the model; several threads may call it at once."""


class CallCounter:
    """Counts calls of `tick` from several threads, without a lock."""

    __slots__ = ("_lock", "_looks", "tick")

    def __init__(self) -> None:
        counter = itertools.count()
        self.tick = counter.__next__
        self._looks = 0
        self._lock = Lock()

    def after_fork(self) -> None:
        """Replaces the lock in a forked child, since a thread of the parent may have held it."""
        self._lock = Lock()

    def value(self) -> int:
        """The number of calls of `tick` so far."""
        with self._lock:
            found = self.tick() - self._looks
            self._looks += 1
            return found


Probation = FirstCall | CanaryProbation | TrainingSmokeCheck
"""Checks of an executor's calls before it is proved, and of every N-th call after."""


@dataclass(eq=False, slots=True)
class Entry:
    """The serving state of one signature: its plan (resolution), executor and counters.

    Attributes:
        signature: the signature of the calls; None if it could not be computed.
        resolution: the resolution that this entry was made from.
        reason: why the model runs untouched; None if `executor` serves.
        executor: the executor built for the candidate that `resolution` chose.
        call: the executor's function; None runs the model untouched.
        probation: checks the first calls, until the executor is proved.
        is_proved: whether `probation` has passed.
        is_unserved: whether the model runs untouched until the signature is resolved again.
        begin: called before the executor to prepare `outdated`; None if nothing needs preparing.
        outdated: called after the executor; True if its result may come from old weights. None if
            the executor calls the model itself.
        is_replay: whether the executor replays a recording, which ignores grad mode.
        lends: whether the executor gets copies of the containers among the arguments. Its writes
            to the copies reach the caller's containers together with the result, or not at all.
        is_padded: whether calls are padded and served by the entry of another signature.
        hits: counts calls that the executor answered.
        others: counts calls that the model answered.
        finding: the canary's finding.
        check: compares every `verify_every`-th call with the untouched model; None for no checks.
        turn: counts calls for `check`.
    """

    signature: Signature | None
    resolution: Resolution
    reason: str | None = None
    executor: Executor | None = None
    call: Callable[..., Any] | None = None
    probation: Probation | None = None
    is_proved: bool = False
    is_unserved: bool = False
    begin: Callable[[], None] | None = None
    outdated: Callable[[], bool] | None = None
    is_replay: bool = False
    lends: bool = False
    is_padded: bool = False
    hits: CallCounter = field(default_factory=CallCounter)
    others: CallCounter = field(default_factory=CallCounter)
    finding: str = ""
    check: Probation | None = None
    turn: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    @property
    def detail(self) -> str:
        """Current details of the reason why the model runs untouched."""
        detail = self.resolution.detail
        return detail() if callable(detail) else detail

    def serving(self) -> Serving:
        """This entry's line in the serving report."""
        candidate, origin = self.resolution.candidate, self.resolution.origin
        return Serving(
            signature=str(self.signature),
            executor=describe(candidate or (), "") if self.call is not None else None,
            reason=self.reason,
            detail=self.detail,
            hits=self.hits.value(),
            others=self.others.value(),
            plan=None if origin is None else origin.plan,
            saved_per_call_ns=0.0 if origin is None else origin.saved_ns,
            break_even_calls=None if origin is None else origin.break_even_calls,
            finding=self.finding,
        )

    def prove(self) -> None:
        """Marks the executor as having passed its first checks, which ends its probation."""
        self.probation, self.is_proved = None, True

    def retire(self, reason: str) -> None:
        """Sends later calls to the untouched model; calls in flight finish with the executor."""
        self.reason, self.call, self.probation, self.is_proved = reason, None, None, False


def obstacle(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Returns why a call must run untouched, whatever its signature, or None."""
    if _is_any_autocast_enabled():
        return "called under autocast"
    if _is_transformed():
        return "called inside a PyTorch transformation (vmap, jvp, compile, a mode)"
    if is_grad_enabled() and needs_gradient((*args, *kwargs.values())):
        return NEEDS_GRADIENT
    return None


def _is_transformed() -> bool:
    return bool(
        _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or is_compiling()
        or has_function_mode()
    )


class Gate:
    """Switches tuned serving off for all signatures.

    Attributes:
        off: why serving is off, or None if it is on.
        until: the `time.monotonic` time at which `off` expires.
        mode: the model's `training` flag when executors were built.
        settings: process-wide settings when executors were built; see `ambient.in_force`.
    """

    __slots__ = ("mode", "off", "settings", "until")

    def __init__(self, mode: bool) -> None:
        self.off: str | None = None
        self.until = math.inf
        self.mode = mode
        self.settings = in_force()


Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Run = Callable[[Entry, tuple[Any, ...], dict[str, Any]], Any]


class SlowPaths(NamedTuple):
    """Handlers for calls that leave the fast path.

    Attributes:
        slow_path: any call; the slow path with every check.
        without_key: a call without a key; takes the error raised while computing the key.
        failed: a call whose executor raised, or was retired by another thread (error None). Also
            takes the copies of containers that the executor worked on, if any.
        stale: a call whose result may come from old weights.
        unserved: a call of a signature that is settled as untouched.
        checked: a call to compare with the untouched model.
    """

    slow_path: Serve
    without_key: Callable[[Exception, tuple[Any, ...], dict[str, Any]], Any]
    failed: Callable[
        [Entry, Exception | None, tuple[Any, ...], dict[str, Any], BorrowedArguments | None], Any
    ]
    stale: Run
    unserved: Run
    checked: Run


def runner(slow_paths: SlowPaths, verify_every: int | None = None) -> Run:
    """Makes the function that calls an entry's executor and checks the weights.

    Args:
        slow_paths: handlers for the other calls.
        verify_every: sends every N-th call of an entry to `checked`; None for no checks.
    """
    failed, stale, checked = slow_paths.failed, slow_paths.stale, slow_paths.checked

    def run(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if verify_every is not None and entry.turn() % verify_every == 0:
            return checked(entry, args, kwargs)
        call = entry.call
        if call is None:  # retired by another thread
            return failed(entry, None, args, kwargs, None)
        borrowed = BorrowedArguments((args, kwargs)) if entry.lends else None
        given, named = (args, kwargs) if borrowed is None else borrowed.arguments
        try:
            if (begin := entry.begin) is not None:
                begin()
            if entry.is_replay or not is_grad_enabled():
                result = call(*given, **named)
            else:  # `without_gradients` inlined
                _set_grad_enabled(False)
                try:
                    result = call(*given, **named)
                finally:
                    _set_grad_enabled(True)
        except Exception as error:
            return failed(entry, error, args, kwargs, borrowed)
        # Checks after the launch, while the GPU works; a stale result is thrown away.
        if (outdated := entry.outdated) is not None and outdated():
            return stale(entry, args, kwargs)
        if borrowed is not None:
            try:
                result = borrowed.give_back(result)
            except UnsupportedError as error:
                return failed(entry, error, args, kwargs, None)
        entry.hits.tick()
        return result

    return run


def fast_path(  # noqa: C901 - inlined for speed
    model: nn.Module,
    gate: Gate,
    found: dict[Any, Entry],
    slow_paths: SlowPaths,
    run: Run,
    compiled: Any = None,
) -> Serve:
    """Makes the function that serves calls on the fast path: one lookup, one executor, no lock.

    The function is a closure because attribute lookups on an `nn.Module` are slow compared with the
    dispatch.

    Args:
        model: the untouched model.
        gate: if off, every call takes the slow path.
        found: entries by key, as `key_function` computes it.
        slow_paths: handlers for the other calls.
        run: the function made by `runner`.
        compiled: the compiled host code given to `key_function`, or None.
    """
    attributes, get = vars(model), found.get
    slow_path, without_key, unserved = (
        slow_paths.slow_path,
        slow_paths.without_key,
        slow_paths.unserved,
    )
    if "training" not in attributes:  # a scripted model
        return slow_path

    def serve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if gate.off is not None:
            return slow_path(args, kwargs)
        try:
            entry = get(quick_key(args, kwargs))
            is_watched = is_grad_enabled() and needs_gradient((*args, *kwargs.values()))
        except Exception as error:
            return without_key(error, args, kwargs)
        if (
            entry is None
            or is_watched
            or attributes["training"] is not gate.mode
            or needed.alive
            # `obstacle` inlined; export appears in the dispatch stack.
            or _is_any_autocast_enabled()
            or forward_ad._current_level >= 0
            or _len_torch_dispatch_stack()
            or peek_interpreter_stack() is not None
            or is_dynamo_compiling()
            or (_len_torch_function_stack() and has_function_mode())
            or in_force() != gate.settings
            or not (entry.is_proved or entry.is_unserved)
        ):
            return slow_path(args, kwargs)
        return (run if entry.is_proved else unserved)(entry, args, kwargs)

    if compiled is None:
        return serve
    clear_key = compiled.clear_key

    def serve_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Dynamo cannot trace `clear_key`, so it must see the test for compiling first.
        if gate.off is not None:
            return slow_path(args, kwargs)
        if is_dynamo_compiling() or (key := clear_key(args, kwargs)) is None:
            return serve(args, kwargs)
        entry = get(key)
        if (
            entry is None
            or not (entry.is_proved or entry.is_unserved)
            or attributes["training"] is not gate.mode
            or needed.alive
            or forward_ad._current_level >= 0
            or (_len_torch_function_stack() and has_function_mode())
            or in_force() != gate.settings
        ):
            return slow_path(args, kwargs)
        return (run if entry.is_proved else unserved)(entry, args, kwargs)

    return serve_tensors
