"""Serves calls of a model: one tuned executor per input signature, else the untouched model.

Dispatch: the shapes, strides, dtypes and devices of the arguments form a key, which maps to an
entry with the executor. The fast path does one dictionary look-up, one executor call, one weight
check and one counter increment. The fast path takes no lock and enters no context manager.

Stale weights: executors that call the original model (under `inference_mode` or with flags set)
read its weights at each call. Other executors (model copies, folded or compiled weights, recorded
graphs) keep weight values or addresses from build time. Each call of an executor with stored
weights compares the model's tensors, submodules, hooks and modes with their state at build time.
The weight check runs after the kernel launches, while the GPU works. A result that may come from
stale weights is discarded. The class `Weights` documents how changes are detected, and the limits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from types import MappingProxyType, MethodType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from steadytorch.ambient import in_force
from steadytorch.errors import PlanError, one_line
from steadytorch.native.host import load
from steadytorch.ranks.agreement import UncertainError
from steadytorch.runtime import settings
from steadytorch.runtime.buckets import VERIFYING, Fitted
from steadytorch.runtime.dispatch import (
    NO_PLAN,
    RECONSIDERED_S,
    Entry,
    Gate,
    Probation,
    Resolution,
    Resolver,
    Run,
    SlowPaths,
    fast_path,
    obstacle,
    runner,
)
from steadytorch.runtime.entries import STALE, TAKEN, Entries, ServingOptions, log
from steadytorch.runtime.faults import Raised, is_callers, noting
from steadytorch.runtime.forks import FORKED, watch
from steadytorch.runtime.keys import key_function, quick_key, why_no_key
from steadytorch.runtime.lending import lending
from steadytorch.runtime.module_proxy import ModuleProxy
from steadytorch.runtime.probation import WatchedAnswer
from steadytorch.runtime.report import Report, Tally
from steadytorch.runtime.served_inputs import Guarded, NotServedError
from steadytorch.runtime.smoke_check import TrainingSmokeCheck
from steadytorch.workload.containers import BorrowedArguments
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import without_gradients

FAILED = "the tuned executor failed"
RAISED = "raised: the caller's own exception"
KEYLESS = "these inputs have no signature"
RELOADED = "the same weights were loaded again"
SWITCHED = "the model was switched between train and eval"
SETTINGS_CHANGED = "process-wide settings changed since the plan was set up"
_OPTIONS = ServingOptions()
_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


class TunedModule(ModuleProxy):
    """A wrapper that runs a model tuned if a plan exists for the inputs, and untouched otherwise.

    A tuned module has the call signature, attributes, parameters and state dict of the wrapped
    model. Additional methods are `report`, `refresh`, `static_inputs` and `close`. When an executor
    fails, the untouched model answers and `report` gives the reason. Outputs of tuned calls have no
    autograd history.

    Executors are retired when weights are written to, moved or replaced after the plan was applied.
    Replacing, hooking or switching submodules between train and eval retires executors too.
    `refresh` rebuilds retired executors. Some changes cannot be detected: the writes that `Weights`
    lists, and class attributes such as `forward`. After an undetectable change, call `refresh`.

    A deep copy of a tuned module serves the same plan with its own executors. An unpickled tuned
    module runs untouched, because the plan was not checked on the loading machine.

    Args:
        model: the untouched model; it is called, never changed.
        resolve: returns the resolution for a signature.
        fits: returns why the plan must not serve a model, or None; called here and by `refresh`.
        options: how to serve.
    """

    _resolve: Resolver
    _fits: Callable[[nn.Module], str | None] | None
    _options: ServingOptions
    _entries: Entries
    _gate: Gate
    _tally: Tally
    _run: Run
    _run_unchecked: Run

    def __init__(
        self,
        model: nn.Module,
        resolve: Resolver,
        fits: Callable[[nn.Module], str | None] | None = None,
        options: ServingOptions = _OPTIONS,
    ) -> None:
        super().__init__(model)
        entries, gate = Entries(model, resolve, options, fits), Gate(model.training)
        slow_paths = SlowPaths(
            self._slow_path,
            self._without_key,
            self._failed,
            self._stale,
            self._known_miss,
            self._checked,
        )
        compiled, _ = load()
        run = runner(slow_paths, options.verify_every)
        serve = fast_path(model, gate, entries.found, slow_paths, run, compiled)
        hooks = [vars(self)[f"_{kind}_hooks"] for kind in _HOOKS]
        hooks += [getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in _HOOKS]
        vars(self).update(  # ModuleProxy.__setattr__ would set these on the model
            _resolve=resolve,
            _fits=fits,
            _options=options,
            _entries=entries,
            _found=entries.found,
            _gate=gate,
            _tally=Tally(),
            _run=run,
            _run_unchecked=runner(slow_paths),
            _key=key_function(compiled),
            _entrance=(serve, hooks),
        )
        watch(self)
        self._gate.off = self._why_off()
        if self._gate.off is not None:
            log.warning("running untouched: %s", self._gate.off)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, with hooks around it if any are registered."""
        # nn.Module.__call__ looks hooks up by name, which takes 1 us.
        serve, hooks = self._entrance
        return super().__call__(*args, **kwargs) if any(hooks) else serve(args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute as `ModuleProxy` does; later calls use a newly set `forward`."""
        super().__setattr__(name, value)
        if name == "forward":
            self._entrance[1].append({name: value})  # so that `__call__` looks it up

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the tuned executor for these inputs, or the untouched model.

        Raises:
            PlanError: in strict mode, if no plan matches these inputs or the model's mode.
            Exception: exceptions of the model propagate.
        """
        return self._entrance[0](args, kwargs)

    def report(self) -> Report:
        """Returns counts of tuned and untouched calls by signature, with reasons and time saved."""
        return self._tally.report(
            self._entries.servings(),
            self._gate.off,
            self._entries.weights.interpreted_for,
            self._options.verify_every,
        )

    def static_inputs(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the input buffers of the CUDA graph that serves these inputs.

        A CUDA graph reads its inputs at fixed addresses. To avoid copying the inputs, write the
        next batch into the returned buffers and pass the buffers to this module::

            (images,), _ = fast.static_inputs(example)
            loader.read_into(images)
            outputs = fast(images)

        Only one caller may use the buffers at a time. Any other call with the same input signature
        overwrites the buffers.

        Args:
            args: example positional arguments.
            kwargs: example keyword arguments.

        Returns:
            Positional and keyword arguments to write to and to call with. If no graph serves these
            inputs, returns `args` and `kwargs` themselves, so that the same code runs everywhere.
        """
        if self._gate.off is not None or obstacle(args, kwargs) is not None:
            return args, kwargs
        try:
            key = self._key(args, kwargs)
            entry = self._found.get(key) or self._entries.first_sight(key, args, kwargs)
            executor = entry.executor
            if entry.call is None or executor is None or executor.static is None:
                return args, kwargs
            static_args, static_kwargs = executor.static
            same = quick_key(static_args, static_kwargs) == quick_key(args, kwargs)
        except Exception:
            return args, kwargs
        return executor.static if same else (args, kwargs)

    def refresh(self) -> None:
        """Drops all executors; later calls rebuild them from the model's current state.

        Call `refresh` after changing weights, environment variables or process-wide PyTorch
        settings, while no call is running.
        """
        self._free("refreshed")
        self._gate.mode, self._gate.settings = self._model.training, in_force()
        self._gate.off, self._gate.until = self._why_off(), math.inf

    def close(self) -> None:
        """Frees the executors. The untouched model serves all later calls."""
        self._free("closed")

    # -- serving --------------------------------------------------------------------------------

    def _slow_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call off the fast path, with all checks."""
        off = self._gate.off
        if off is not None:
            if monotonic() < self._gate.until:
                return self._untouched(off, args, kwargs)
            self._gate.off, self._gate.until = None, math.inf
        reason = obstacle(args, kwargs)
        if reason is not None:
            return self._untouched(reason, args, kwargs)
        if self._model.training is not self._gate.mode:
            return self._missed(SWITCHED, args, kwargs)
        if in_force() != self._gate.settings:
            if self._entries.is_built:
                return self._untouched(SETTINGS_CHANGED, args, kwargs)
            self._gate.settings = in_force()
        try:
            entry = self._entries.of_call(self._key(args, kwargs), args, kwargs)
        except UncertainError:  # serving untouched could differ from the other ranks
            raise
        except Exception as error:
            return self._serve_without_key(error, args, kwargs)
        if entry.resolution.for_all and not self._entries.is_built:
            self._gate.off, self._gate.until = entry.resolution.reason, monotonic() + RECONSIDERED_S
            self._entries.forget(entry)
        answer = self._padded if entry.is_padded else self._serve_entry
        return answer(entry, args, kwargs)

    def _serve_entry(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serves a call with its entry's executor, or untouched if the entry has none."""
        if entry.call is None:
            return self._unserved(entry, args, kwargs, entry)
        if entry.probation is None and not settings.needed.alive:
            return self._run(entry, args, kwargs)
        # Waits while process-wide flags are in use, as an untouched call would wait too. Waits for
        # a smoke check, which restores buffers and would undo the updates of a concurrent call.
        waits = (
            settings.needed.alive
            or entry.probation is None
            or isinstance(entry.probation, TrainingSmokeCheck)
        )
        turns = settings.TURNS
        if not turns.acquire(blocking=bool(waits)):
            return self._untouched(TAKEN, args, kwargs, entry)
        try:
            if entry.call is not None and entry.probation is not None:
                return self._on_probation(entry, entry.probation, args, kwargs)
            return self._run(entry, args, kwargs)
        finally:
            turns.release()

    def _checked(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compares a tuned call with the untouched model, unless another call holds the lock."""
        check, turns = entry.check, settings.TURNS
        if entry.call is None or check is None or not turns.acquire(blocking=False):
            return self._run_unchecked(entry, args, kwargs)
        try:
            self._tally.count_check()
            return self._on_probation(entry, check, args, kwargs)
        finally:
            turns.release()

    def _on_probation(
        self, entry: Entry, probation: Probation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert not isinstance(probation, TrainingSmokeCheck)  # `TrainedModule` overrides this
        if isinstance(entry.call, Guarded) and (reason := entry.call.refuses(args, kwargs)):
            return self._untouched(reason, args, kwargs, entry)
        weights = self._entries.weights
        if entry.outdated is not None and (weights.rewritten() or weights.changed()):
            return self._stale(entry, args, kwargs)
        tuned, untouched, own = entry.call or self._model, self._model, list[Exception]()
        if entry.lends:
            tuned, untouched = lending(tuned), lending(untouched)
        inputs = tensors_of((args, kwargs))
        try:
            outcome: WatchedAnswer = probation.answer(
                partial(without_gradients, tuned, args, kwargs),
                noting(own, partial(untouched, *args, **kwargs)),
                inputs,
            )
            result = outcome.result.give_back() if entry.lends else outcome.result
        except Raised as raised:
            self._tally.count(RAISED)
            raise raised.error from None
        except Exception as error:
            if error in own:
                raise
            return self._failed(entry, error, args, kwargs)
        self._settle(entry, outcome)
        return result

    def _settle(self, entry: Entry, outcome: WatchedAnswer) -> None:
        if outcome.finding is not None:
            entry.finding = outcome.finding.reason
        if outcome.tuned:
            entry.hits.tick()
        else:
            entry.others.tick()
            self._tally.count(f"untouched: {outcome.fault or 'the canary is checking the plan'}")
        if outcome.settled:
            entry.prove()
        if outcome.fault is None:
            return
        if outcome.of_model:
            entry.retire(outcome.fault)
            self._stop(outcome.fault)
        else:
            reason = f"demoted: {outcome.fault}"
            entry.retire(reason)
            self._entries.warn(f"{reason} ({entry.signature})")

    def _padded(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        buckets = self._options.buckets
        fitted = "no buckets" if buckets is None else buckets.fit(args, kwargs)
        if not isinstance(fitted, Fitted):
            answered = self._untouched if fitted == VERIFYING else self._missed
            return answered(fitted, args, kwargs, entry)
        padded_args, padded_kwargs = fitted.args, dict(fitted.kwargs)
        key = self._key(padded_args, padded_kwargs)
        bucket = self._entries.of_call(key, padded_args, padded_kwargs)
        if bucket.call is None:
            return self._unserved(bucket, args, kwargs, entry)
        try:
            return fitted.slice_outputs(self._serve_entry(bucket, padded_args, padded_kwargs))
        except Exception:  # caused by the padding, so not the caller's to handle
            return self._untouched("the padded call failed", args, kwargs, entry)

    def _stale(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if self._entries.forgives():
            return self._untouched(RELOADED, args, kwargs, entry)
        reason = self._entries.retire_outdated()
        if reason != STALE:
            self._stop(reason)
        return self._untouched(reason, args, kwargs, entry)

    def _failed(
        self,
        entry: Entry,
        error: Exception | None,
        args: Any,
        kwargs: Any,
        borrowed: BorrowedArguments | None = None,
    ) -> Any:
        if error is None:
            return self._untouched(entry.reason or NO_PLAN, args, kwargs, entry)
        if isinstance(error, NotServedError):
            return self._untouched(str(error), args, kwargs, entry)
        executor = entry.executor
        if executor is not None and is_callers(error, executor.modules, executor.is_live):
            self._tally.count(RAISED)
            if borrowed is not None:  # passes on writes made before the exception
                borrowed.give_back()
            raise error
        # If the untouched model raises too, the inputs are at fault and the entry stays.
        answer = self._untouched(FAILED, args, kwargs, entry)
        entry.retire(FAILED)
        self._entries.warn(FAILED, one_line(error))
        return answer

    def _without_key(self, error: Exception, args: Any, kwargs: Any) -> Any:
        """Serves a call whose arguments have no key.

        In strict mode, the slow path first checks for other reasons to run untouched.
        """
        if self._options.strict:
            return self._slow_path(args, kwargs)
        return self._serve_without_key(error, args, kwargs)

    def _serve_without_key(self, error: Exception, args: Any, kwargs: Any) -> Any:
        why = partial(why_no_key, error, args, kwargs)
        if not self._options.strict:
            self._entries.warn(KEYLESS, why)
            return self._untouched(KEYLESS, args, kwargs)
        return self._missed(KEYLESS, args, kwargs, detail=f"{KEYLESS}: {why()}")

    def _unserved(self, served: Entry, args: Any, kwargs: Any, entry: Entry) -> Any:
        """Serves a call whose entry has no executor: no plan exists, or the plan is not in use."""
        reason = served.reason or NO_PLAN
        if served.resolution.candidate is None:
            detail = served.detail if self._options.strict else ""
            return self._missed(reason, args, kwargs, entry, detail)
        return self._untouched(reason, args, kwargs, entry)

    def _known_miss(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        return self._untouched(entry.reason or NO_PLAN, args, kwargs, entry)

    def _missed(
        self, reason: str, args: Any, kwargs: Any, entry: Entry | None = None, detail: str = ""
    ) -> Any:
        """Handles a call without a plan: raises in strict mode, else runs the untouched model."""
        if not self._options.strict:
            return self._untouched(reason, args, kwargs, entry)
        self._tally.count(f"raised: {reason}")
        of = "" if entry is None else f" ({entry.signature})"
        raise PlanError(f"no stored plan for {type(self._model).__name__}{of}: {detail or reason}")

    def _untouched(self, reason: str, args: Any, kwargs: Any, entry: Entry | None = None) -> Any:
        self._tally.count(f"untouched: {reason}")
        if entry is not None:
            entry.others.tick()
        if settings.needed.alive:
            with settings.TURNS:
                return self._model(*args, **kwargs)
        return self._model(*args, **kwargs)

    # -- life -----------------------------------------------------------------------------------

    def _why_off(self) -> str | None:
        self.__dict__["_misfit"] = self._reason_to_be_off()
        return self._misfit

    def _reason_to_be_off(self) -> str | None:
        if settings.is_switched_off():
            return f"{settings.SWITCH} is off"
        return None if self._fits is None else self._fits(self._model)

    def _stop(self, reason: str) -> None:
        self._gate.off, self._gate.until = reason, math.inf
        self._entries.warn(reason)

    def _switch_off(self, reason: str) -> None:
        if self._gate.off is None:
            self._stop(f"{reason} after the plan was applied; refresh() serves tuned again")

    def _look(self) -> Any:
        if not self._entries.is_built:
            return None
        weights, places = self._entries.weights, self._entries.weights.places()
        return weights.rewritten() or weights.changed(), places

    def _look_again(self, before: Any, reason: str) -> None:
        if self._entries.is_built:
            if self._look() != before:
                self._switch_off(reason)
        elif self._gate.off == self._misfit or self._gate.until < math.inf:
            # Without executors, the change may decide whether a plan fits.
            self._gate.off, self._gate.until = self._why_off(), math.inf

    def _expect_load(self, given: Mapping[str, Any], prefix: str = "") -> None:
        if self._entries.is_built and not self._entries.weights.expect(given, prefix):
            self._switch_off("weights were loaded")

    def _noted(self, method: MethodType) -> MethodType:
        return method if is_compiling() else self._tally.noted(method)

    def after_fork(self) -> None:
        """Switches a forked child to the untouched model; see the module `forks`."""
        self._entries.after_fork()
        self._tally.after_fork()
        self._gate.off = self._gate.off or FORKED

    def _free(self, reason: str) -> None:
        self._gate.off, self._gate.until = reason, math.inf
        self._tally.keep(self._entries.close())

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedModule:
        made = type(self)(
            copy.deepcopy(self._model, memo), self._resolve, self._fits, self._options
        )
        made._gate.off = self._gate.off
        self._copy_hooks(made, memo)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self._model, self._own_hooks())


def _opened(model: nn.Module, hooks: Mapping[str, Any] = MappingProxyType({})) -> TunedModule:
    copied = "it was copied; apply the plan to the copy"
    made = TunedModule(model, lambda context: Resolution(None), lambda model: copied)
    for name, held in hooks.items():
        if isinstance(held, dict):
            made.__dict__[name].update(held)
        else:
            made.__dict__[name] = held
    return made
