"""From the arguments of a call to what serves it: what stands in the way, and the entry.

Everything here that a served call passes through is written for speed. Counters need no lock.
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
    _set_grad_enabled,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from steadytorch.compiled.prebuilt import Source
from steadytorch.errors import UnsupportedError
from steadytorch.results.candidate import Candidate
from steadytorch.results.signature import Signature
from steadytorch.runtime.executors import Executor
from steadytorch.runtime.keys import needs_gradient, quick_key
from steadytorch.runtime.report import Serving
from steadytorch.runtime.settings import needed
from steadytorch.workload.containers import Lent

NO_PLAN = "no plan for these inputs"
RECONSIDERED_S = 10.0
"""Seconds after which it is asked again whether there is a plan for a model that had none."""
NEEDS_GRADIENT = "gradients of the inputs are needed"
NOT_FASTER = "nothing was faster than the untouched model"


class Arrival(NamedTuple):
    """A call of a signature that is seen for the first time."""

    model: nn.Module
    signature: Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Origin(msgspec.Struct, frozen=True):
    """The plan that a candidate comes from, and what it promised.

    Attributes:
        plan: its id.
        saved_ns: what a call was measured to take less than the untouched model, in ns.
        break_even_calls: after how many calls setting it up is paid back; None if not known.
        tolerance: relative L2 error that was allowed; None for the default of its precision.
    """

    plan: str
    saved_ns: float
    break_even_calls: int | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Resolution:
    """What is to serve a signature.

    Attributes:
        candidate: the transforms to run; None for no plan, empty for a plan to leave it untouched.
        reason: why the model runs untouched; a fixed text, fit to count calls by.
        detail: more about that, for the log and the report; a function where it changes.
        origin: where the candidate comes from.
        again: polled on later untouched calls; True resolves again.
        prebuilt: what `compile` among the transforms is to take instead of compiling, if anything.
        for_all: whether it holds for all inputs, for `RECONSIDERED_S`.
    """

    candidate: Candidate | None
    reason: str = NO_PLAN
    detail: str | Callable[[], str] = ""
    origin: Origin | None = None
    again: Callable[[], bool] | None = None
    prebuilt: Source | None = None
    for_all: bool = False


Resolver = Callable[[Arrival], Resolution]
"""Says what serves a signature. It must not call the model; threads ask it at once."""


class Ticks:
    """A count that threads raise without a lock, by calling `tick`."""

    __slots__ = ("_lock", "_looks", "tick")

    def __init__(self) -> None:
        counter = itertools.count()
        self.tick = counter.__next__
        self._looks = 0
        self._lock = Lock()

    def after_fork(self) -> None:
        """Makes the lock anew: a thread that is gone may have held it."""
        self._lock = Lock()

    def value(self) -> int:
        """How often `tick` was called."""
        with self._lock:
            found = self.tick() - self._looks
            self._looks += 1
            return found


@dataclass(eq=False, slots=True)
class Entry:
    """What serves one signature.

    Attributes:
        signature: of the calls; None where there is none.
        resolution: what it was made from.
        reason: why the model runs untouched; None where `executor` serves.
        executor: what was built.
        call: of the executor; None runs the model untouched.
        trial: watches the calls until the executor has proved itself.
        is_proved: whether it has.
        is_unserved: whether the model runs untouched, and will until it is resolved anew.
        begin: called before the executor, to prepare `outdated`; None where nothing is to prepare.
        outdated: whether a result may be that of other weights, asked after each call; None where
            the executor runs the model itself.
        is_replay: whether the executor replays a recording, so that grad mode does not matter.
        lends: whether the executor gets copies of the containers among the arguments, so that what
            it writes to them reaches the caller with its result, or not at all.
        is_padded: whether calls are padded to another signature, which serves them.
        hits: calls that the executor answered.
        others: calls that the model answered.
        finding: of the canary.
        check: compares a call with the untouched model's, every `verify_every` calls; None for
            never.
        turn: counts the calls that it may fall on.
    """

    signature: Signature | None
    resolution: Resolution
    reason: str | None = None
    executor: Executor | None = None
    call: Callable[..., Any] | None = None
    trial: Any = None
    is_proved: bool = False
    is_unserved: bool = False
    begin: Callable[[], None] | None = None
    outdated: Callable[[], bool] | None = None
    is_replay: bool = False
    lends: bool = False
    is_padded: bool = False
    hits: Ticks = field(default_factory=Ticks)
    others: Ticks = field(default_factory=Ticks)
    finding: str = ""
    check: Any = None
    turn: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    @property
    def detail(self) -> str:
        """More about the reason, as it is now."""
        detail = self.resolution.detail
        return detail() if callable(detail) else detail

    def serving(self) -> Serving:
        """What is known of it, for the report."""
        candidate, origin = self.resolution.candidate, self.resolution.origin
        return Serving(
            signature=str(self.signature),
            executor=" + ".join(map(str, candidate or ())) if self.call is not None else None,
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
        """Ends the trial."""
        self.trial, self.is_proved = None, True

    def retire(self, reason: str) -> None:
        """The model runs untouched from now on; calls on their way end as they began."""
        self.reason, self.call, self.trial, self.is_proved = reason, None, None, False


def obstacle(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call must run untouched whatever serves its signature, or None."""
    if _is_any_autocast_enabled():
        return "called under autocast"
    if _is_transformed():
        return (
            "called inside of a transformation of PyTorch's (vmap, jvp, compile, a dispatch mode)"
        )
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
    )


class Gate:
    """What keeps calls of all signatures from being served tuned.

    Attributes:
        off: the reason, or None.
        until: when the reason is to be asked for anew, by `time.monotonic`.
        mode: train or eval, as the model was when executors were built.
    """

    __slots__ = ("mode", "off", "until")

    def __init__(self, mode: bool) -> None:
        self.off: str | None = None
        self.until = math.inf
        self.mode = mode


Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Run = Callable[[Entry, tuple[Any, ...], dict[str, Any]], Any]


class Detours(NamedTuple):
    """What answers a call that cannot be served the plain way.

    Attributes:
        with_care: any call.
        keyless: one without a key, for the error that making one has raised.
        failed: one in which the executor raised, or (None) is gone meanwhile; with the copies of
            containers that it worked on, if any.
        stale: one whose result may be that of other weights.
        unserved: one of a signature that nothing serves, and nothing is to be asked about.
        checked: one that the untouched model answers as well.
    """

    with_care: Serve
    keyless: Callable[[Exception, tuple[Any, ...], dict[str, Any]], Any]
    failed: Callable[[Entry, Exception | None, tuple[Any, ...], dict[str, Any], Lent | None], Any]
    stale: Run
    unserved: Run
    checked: Run


def runner(detours: Detours, verify_every: int | None = None) -> Run:
    """Makes the function that calls an entry's executor and looks at the weights.

    Args:
        detours: what answers otherwise.
        verify_every: every so many calls of an entry one is `checked`; None for never.
    """
    failed, stale, checked = detours.failed, detours.stale, detours.checked

    def run(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if verify_every is not None and entry.turn() % verify_every == 0:
            return checked(entry, args, kwargs)
        call = entry.call
        if call is None:  # retired by another thread
            return failed(entry, None, args, kwargs, None)
        lent = Lent((args, kwargs)) if entry.lends else None
        given, named = (args, kwargs) if lent is None else lent.arguments
        try:
            if (begin := entry.begin) is not None:
                begin()
            if entry.is_replay or not is_grad_enabled():
                result = call(*given, **named)
            else:  # `without_gradients`, without a call
                _set_grad_enabled(False)
                try:
                    result = call(*given, **named)
                finally:
                    _set_grad_enabled(True)
        except Exception as error:
            return failed(entry, error, args, kwargs, lent)
        # Looked at after launching, so that a GPU works meanwhile; a stale result is thrown away.
        if (outdated := entry.outdated) is not None and outdated():
            return stale(entry, args, kwargs)
        if lent is not None:
            try:
                result = lent.give_back(result)
            except UnsupportedError as error:
                return failed(entry, error, args, kwargs, None)
        entry.hits.tick()
        return result

    return run


def fast_path(  # noqa: C901 - inlined for speed
    model: nn.Module,
    gate: Gate,
    found: dict[Any, Entry],
    detours: Detours,
    run: Run,
    compiled: Any = None,
) -> Serve:
    """Fast path: one look-up, one executor, no lock.

    It is a closure because looking up attributes of an `nn.Module` takes a good part of the time
    that dispatch may take.

    Args:
        model: the untouched model.
        gate: where closed, every call takes a detour.
        found: entry by key, as `key_function` makes them.
        detours: what answers otherwise.
        run: from `runner`.
        compiled: as `key_function` was given.
    """
    attributes, get = vars(model), found.get
    with_care, keyless, unserved = detours.with_care, detours.keyless, detours.unserved
    if "training" not in attributes:  # a scripted model
        return with_care

    def serve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if gate.off is not None:
            return with_care(args, kwargs)
        try:
            entry = get(quick_key(args, kwargs))
            is_watched = is_grad_enabled() and needs_gradient((*args, *kwargs.values()))
        except Exception as error:
            return keyless(error, args, kwargs)
        if (
            entry is None
            or is_watched
            or attributes["training"] is not gate.mode
            or needed.alive
            # `obstacle`, without calls: exporting shows in the stack.
            or _is_any_autocast_enabled()
            or forward_ad._current_level >= 0
            or _len_torch_dispatch_stack()
            or peek_interpreter_stack() is not None
            or is_dynamo_compiling()
            or not (entry.is_proved or entry.is_unserved)
        ):
            return with_care(args, kwargs)
        return (run if entry.is_proved else unserved)(entry, args, kwargs)

    if compiled is None:
        return serve
    clear_key = compiled.clear_key

    def serve_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The compiler knows no `clear_key`, and must see that nothing of this is to be compiled.
        if gate.off is not None:
            return with_care(args, kwargs)
        if is_dynamo_compiling() or (key := clear_key(args, kwargs)) is None:
            return serve(args, kwargs)
        entry = get(key)
        if (
            entry is None
            or not (entry.is_proved or entry.is_unserved)
            or attributes["training"] is not gate.mode
            or needed.alive
            or forward_ad._current_level >= 0
        ):
            return with_care(args, kwargs)
        return (run if entry.is_proved else unserved)(entry, args, kwargs)

    return serve_tensors
