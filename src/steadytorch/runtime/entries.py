"""The executor table of a tuned module, filled at the first call with each input signature."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

from steadytorch import transforms
from steadytorch.errors import UnsupportedError, UsageError, one_line
from steadytorch.results.candidate import Candidate
from steadytorch.runtime import settings
from steadytorch.runtime.agreement import bound
from steadytorch.runtime.buckets import Buckets
from steadytorch.runtime.canary import Canary, Recheck
from steadytorch.runtime.dispatch import (
    NOT_FASTER,
    CallContext,
    Entry,
    Probation,
    Resolution,
    Resolver,
)
from steadytorch.runtime.executors import Executor, build
from steadytorch.runtime.keys import full_key
from steadytorch.runtime.probation import CanaryProbation, FirstCall
from steadytorch.runtime.report import Serving
from steadytorch.runtime.smoke_check import TrainingSmokeCheck
from steadytorch.runtime.state import DRAWS, KEEPS_STATE, writes_of
from steadytorch.runtime.weights import Weights
from steadytorch.workload.containers import holds_containers
from steadytorch.workload.signature import signature
from steadytorch.workload.workload import Workload

log = logging.getLogger("steadytorch")

STALE = "the model changed since the plan was applied"
NOT_APPLIED = "the plan could not be applied"
RESOLVING = "another thread is looking up its plan"
TAKEN = "another thread is building or checking an executor"
BUILDING = "another thread is building its executor"
PENDING = (RESOLVING, TAKEN, BUILDING)
"""Reasons that hold only while another thread is at work."""
MOST_REMEMBERED = 1000
"""Limit on remembered signatures without an executor, and on distinct warnings."""
_PADDED = Resolution(None, "its inputs are padded")
_RESOLVING = Resolution(None, RESOLVING)
_CLASSES = ("same", "tf32", "fp16", "bf16", "int8")
"""Precision classes, from the narrowest tolerance to the widest."""


class ServingOptions(NamedTuple):
    """Options for how a tuned module serves calls.

    Attributes:
        alias_outputs: whether outputs may be buffers that the next call overwrites.
        buckets: pads inputs as the user declared; None to never pad.
        canary: whether the first calls of a plan are checked against the untouched model.
        trains: whether plans are for training; see `runtime.trained`.
        pads: whether outputs may be padded, because only a compiled loss takes them.
        strict: whether calls without a plan raise.
        verify_every: compares every N-th call of a signature with the untouched model; None for no
            checks.
    """

    alias_outputs: bool = False
    buckets: Buckets | None = None
    canary: bool = False
    trains: bool = False
    pads: bool = False
    strict: bool = False
    verify_every: int | None = None


def parse_verify_every(verify_every: int | None) -> int | None:
    """Validates `verify_every`, a number of calls or None.

    Raises:
        UsageError: it is not an integer of 1 or more.
    """
    if verify_every is None or (type(verify_every) is int and verify_every >= 1):
        return verify_every
    raise UsageError(
        f"verify_every must be a number of calls, 1 or more, got {verify_every!r}: "
        "leave it out to verify only the first calls"
    )


class Entries:
    """Looks up the plan and builds the executor of each signature once, in the first call.

    Other threads do not wait for an executor to be built. While one thread builds or checks an
    executor, other threads run the untouched model. There are two exceptions to running without
    waiting. While process-wide flags make tuned calls take turns (`settings`), untouched calls wait
    too. In strict mode, calls with new signatures wait while another plan is looked up.

    Executors are built in a caller's thread. Building an executor runs the model with its own
    weights, draws random numbers and sets process-wide flags. Building inside a call is safe
    because the caller, who waits, does not use the model, random state or flags.

    Args:
        model: the untouched model.
        resolve: resolves a signature.
        options: how to serve.
        fits: returns why the model cannot be served, or None; asked before the first executor is
            built, since the model may have changed until then.

    Attributes:
        found: entries by key; read without a lock.
        weights: the model's weights when the first executor was built.
        is_built: whether any executor was built.
    """

    def __init__(
        self,
        model: nn.Module,
        resolve: Resolver,
        options: ServingOptions,
        fits: Callable[[nn.Module], str | None] | None = None,
    ) -> None:
        self._model, self._resolve, self._options = model, resolve, options
        self._fits = fits
        self.found: dict[Any, Entry] = {}
        self.weights = Weights(model, contents=not options.trains)
        self._by_signature: dict[Any, Entry] = {}
        self.is_built = False
        self._lock = RLock()
        self._warned: set[str] = set()

    def of_call(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Returns the entry for a call; looks up its plan again if the last lookup requested that.

        Raises:
            Exception: these arguments have no signature.
        """
        entry = self.found.get(key)
        if entry is None:
            return self.first_sight(key, args, kwargs)
        if entry.call is not None or (again := entry.resolution.again) is None or not again():
            return entry
        return self.first_sight(key, args, kwargs, entry)

    def first_sight(
        self,
        key: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        instead_of: Entry | None = None,
    ) -> Entry:
        """Returns the table entry for a call whose key is new; creates the entry if needed.

        Args:
            key: the key of the call.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            instead_of: an entry to resolve again; its count of untouched calls is kept.

        Raises:
            Exception: these arguments have no signature.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return Entry(None, Resolution(()), "called while a CUDA graph is recorded")
        described = signature(args, kwargs)
        whole = full_key(described, args, kwargs)
        # Verifying a bucket and building run the model, which may wait for `TURNS`. Holding the
        # lock meanwhile would deadlock.
        padded = self._is_padded(args, kwargs)
        context = CallContext(self._model, described, args, kwargs)
        with self._lock:
            known = self._by_signature.get(whole)
            is_first = known is None or known is instead_of
            if known is None or known is instead_of:
                entry = Entry(described, _PADDED if padded else _RESOLVING, is_padded=padded)
                entry.reason = entry.resolution.reason
                if known is not None:
                    entry.others = known.others
                    self.forget(known)
                self._remember(whole, entry)
                if self._options.strict:
                    self._resolve_for(entry, context)
            else:
                entry = known
        if is_first and not self._options.strict:
            self._resolve_for(entry, context)
        if entry.reason == TAKEN:
            self._build_in_turn(whole, entry, args, kwargs)
        if entry.reason not in PENDING:
            with self._lock:
                if self._by_signature.get(whole) is entry:
                    self.found[key] = entry
        return entry

    def forget(self, entry: Entry) -> None:
        """Drops an entry, so that the next call of its signature is resolved again."""
        with self._lock:
            self._drop(lambda other: other is entry)

    def forgives(self) -> bool:
        """Whether the only change to the model was loading the weights it already had."""
        if not self.weights.is_forgiven():
            return False
        for entry in list(self._by_signature.values()):
            if entry.outdated is not None and entry.executor is not None:
                entry.outdated, entry.begin = self._outdated(entry.executor), self.weights.begin
        return True

    def retire_outdated(self) -> str:
        """Retires the executors that hold outdated weights; returns the reason."""
        # If the model did not change, a call wrote to the executor's copy of its buffers.
        changed = self.weights.rewritten() or self.weights.changed()
        reason = STALE if changed else KEEPS_STATE
        if reason == STALE:
            self.warn(f"{STALE}; refresh() serves tuned again", self.weights.lateness)
        for entry in list(self._by_signature.values()):
            if entry.outdated is not None:
                entry.retire(reason)
        return reason

    def close(self) -> list[Serving]:
        """Frees the executors, forgets the signatures and returns their report lines."""
        with settings.TURNS, self._lock:
            entries, served = list(self._by_signature.values()), self.servings()
            self._drop(lambda entry: True)
            self.is_built = False
        for entry in reversed(entries):
            executor, entry.executor = entry.executor, None
            entry.retire("closed")
            try:
                if executor is not None:
                    executor.close()
            except Exception as error:
                log.warning("a plan was not undone cleanly: %s", one_line(error))
        return served

    def after_fork(self) -> None:
        """Replaces the locks in a forked child, since threads of the parent may have held them."""
        self._lock = RLock()
        for entry in self._by_signature.values():
            entry.hits.after_fork()
            entry.others.after_fork()

    def servings(self) -> list[Serving]:
        """Report lines of the signatures, most calls first."""
        found = [entry.serving() for entry in list(self._by_signature.values())]
        return sorted(found, key=lambda each: -(each.hits + each.others))

    def warn(self, reason: str, detail: str | Callable[[], str] = "") -> None:
        """Logs each reason once as a warning, and its repetitions at debug level.

        Args:
            reason: why the model runs untouched.
            detail: specifics of this case, such as figures; a function is called only if the
                message is logged.
        """
        if reason in self._warned and not log.isEnabledFor(logging.DEBUG):
            return
        detail = detail() if callable(detail) else detail
        text = (
            f"running untouched: {reason}: {detail}" if detail else f"running untouched: {reason}"
        )
        with self._lock:
            is_new = reason not in self._warned and len(self._warned) < MOST_REMEMBERED
            self._warned.add(reason) if is_new else None
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s", text)

    def _is_padded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether calls with these arguments need padding to a bucket."""
        buckets = self._options.buckets
        if buckets is None:
            return False
        fitted = buckets.fit(args, kwargs)
        return isinstance(fitted, str) or fitted.args is not args

    def _resolve_for(self, entry: Entry, context: CallContext) -> None:
        if entry.is_padded:
            return
        try:
            resolution = self._resolve(context)
        except Exception as error:
            resolution = Resolution(None, NOT_APPLIED, one_line(error))
        except BaseException:  # interrupted: a later call resolves again
            self.forget(entry)
            raise
        entry.resolution = resolution
        if resolution.candidate:
            entry.reason = TAKEN
        else:
            entry.reason = resolution.reason if resolution.candidate is None else NOT_FASTER
        is_settled = not (resolution.candidate or resolution.again or entry.is_padded)
        entry.is_unserved = is_settled and not (self._options.strict or self._options.trains)
        if not self._options.strict and resolution.detail:
            self.warn(entry.reason, resolution.detail)

    def _build_in_turn(
        self, whole: Any, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Builds the executor of an entry, unless another thread is building or checking one."""
        turns = settings.TURNS
        if not turns.acquire(blocking=bool(settings.needed.alive)):
            return
        try:
            # Another thread may have built it, or closed the module, in between.
            if entry.reason == TAKEN and self._by_signature.get(whole) is entry:
                entry.reason = BUILDING
                self._build(entry, entry.resolution.candidate or (), args, kwargs)
        except BaseException:  # interrupted: a later call builds it
            self.forget(entry)
            raise
        finally:
            turns.release()

    def _build(
        self, entry: Entry, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        confirm = entry.resolution.confirm or (lambda problem: problem)
        try:
            executor = self._built(entry, candidate, args, kwargs)
        except BaseException as error:  # interrupted
            confirm(type(error).__name__)
            raise
        if executor is None:
            confirm(entry.reason)
            return
        if (reason := confirm(None)) is not None:
            entry.reason = reason
            entry.executor = entry.outdated = entry.begin = None
            executor.close()
            return
        self.is_built = True
        # Set last: other threads already hold this entry.
        entry.call, entry.reason = executor.call, None

    def _built(
        self, entry: Entry, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Executor | None:
        """Builds an executor with its checks; on failure, returns None and sets `entry.reason`."""
        if not self.is_built:
            misfit = None if self._fits is None else self._fits(self._model)
            if misfit is not None:
                entry.reason = misfit
                self.warn(misfit)
                return None
            self.weights.remember()
        elif self.weights.changed():  # `remember` would hide the change from the other entries
            entry.reason = STALE
            return None
        try:
            executor = build(
                *(self._model, args, kwargs, candidate),
                self._options.alias_outputs,
                entry.resolution.prebuilt,
                self._options.trains,
                self._options.pads,
                entry.resolution.shelf,
                entry.resolution.choices,
            )
        except Exception as error:
            known = (KEEPS_STATE, DRAWS) if isinstance(error, UnsupportedError) else ()
            entry.reason = next((each for each in known if each in str(error)), NOT_APPLIED)
            self.warn(NOT_APPLIED, one_line(error))
            return None
        entry.executor, entry.is_replay = executor, executor.static is not None
        entry.outdated = self._outdated(executor)
        entry.lends = holds_containers((*args, *kwargs.values()))
        entry.begin = None if entry.outdated is None else self.weights.begin
        entry.probation, entry.check = self._probations(executor, entry, candidate, args, kwargs)
        return executor

    def _probations(
        self,
        executor: Executor,
        entry: Entry,
        candidate: Candidate,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Probation, Probation]:
        """Returns the check of an executor's first calls, and the check of its later calls."""
        device = Workload(self._model, args, kwargs).device
        if self._options.trains:
            smoke_check = TrainingSmokeCheck(self._model, executor, device, self._options.pads)
            return smoke_check, smoke_check
        watched = executor, self.weights, device
        tolerance = None if entry.resolution.origin is None else entry.resolution.origin.tolerance
        limit = bound(_precision(candidate), self._model, (args, kwargs), tolerance)

        def is_outdated() -> bool:  # `forgives` replaces `entry.outdated`
            return entry.outdated is not None and entry.outdated()

        outdated = None if entry.outdated is None else is_outdated
        # draws=False: an executor past probation draws no random numbers; only other threads do.
        check = CanaryProbation(*watched, Recheck(limit), outdated, draws=False)
        if not self._options.canary:
            return FirstCall(*watched), check
        canary = Canary(limit, alias_outputs=self._options.alias_outputs)
        return CanaryProbation(*watched, canary, outdated), check

    def _outdated(self, executor: Executor) -> Callable[[], bool] | None:
        # Training executors read the weights at each call.
        if executor.is_live or self._options.trains:
            return None
        changed = self.weights.changed
        if len(executor.modules) == 1 or executor.static is not None:
            return changed  # a recording repeats its first call, which was already checked
        wrote = writes_of(executor.modules[-1])
        return lambda: changed() or wrote()

    def _remember(self, whole: Any, entry: Entry) -> None:
        # Bounds memory for inputs that never repeat. Drops 10 % at once, as each scan is slow.
        if len(self._by_signature) >= MOST_REMEMBERED:
            entries = self._by_signature.values()
            idle = [e for e in entries if e.executor is None and e.reason not in PENDING]
            gone = set(map(id, idle[: max(1, MOST_REMEMBERED // 10)]))
            if len(idle) >= MOST_REMEMBERED:
                self._drop(lambda other: id(other) in gone)
        self._by_signature[whole] = entry

    def _drop(self, unwanted: Any) -> None:
        for table in (self.found, self._by_signature):
            for key in [key for key, entry in list(table.items()) if unwanted(entry)]:
                del table[key]


def _precision(candidate: Candidate) -> str:
    """The lowest precision class among the transforms of a candidate."""
    found = {transforms.create(spec).precision for spec in candidate}
    return max(found, key=_CLASSES.index, default="same")
