"""Serves training plans: the gradients of tuned calls reach the model's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steadytorch.runtime.dispatch import Entry, Probation
from steadytorch.runtime.lending import lending
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.smoke_check import TrainingSmokeCheck

NO_GRADIENTS = "called without recording gradients"
CHANGED = "modules, hooks, modes or requires_grad flags changed"


class TrainedModule(TunedModule):
    """A wrapper that trains a model tuned if a plan exists for the inputs, and untouched otherwise.

    `Plan.apply` creates a `TrainedModule` for training plans, with `ServingOptions(trains=True)`.
    Executors compute with the model's own tensors, so optimizer steps and `load_state_dict` take
    effect at the next call. The caller keeps control of loss, optimizer, loss scaling and gradient
    accumulation. The model runs untouched in evaluation mode, without grad mode, under autocast, or
    if inputs require gradients.

    Before the first tuned call of a signature, executor and model each run one forward and
    backward; see `TrainingSmokeCheck`. After the smoke check, exceptions in backward passes
    propagate to the caller. Plans that use `torch.compile` support neither `retain_graph` nor
    `create_graph`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_run"] = self._recording
        self.__dict__["_run_unchecked"] = self._recorded

    @property
    def is_off(self) -> str | None:
        """The reason why all calls run untouched; None if tuned calls are possible."""
        return self._gate.off

    @property
    def fault(self) -> str | None:
        """The reason why a built executor no longer serves; None if all executors do."""
        if self._gate.off is not None:
            return self._gate.off
        retired = (e for e in self._entries.found.values() if e.executor and e.call is None)
        return next((entry.reason for entry in retired), None)

    def end_on_all_ranks(self, reason: str) -> None:
        """Makes all later calls run untouched, because the plan ended on all ranks."""
        self._switch_off(f"ended on all ranks ({reason})")

    def refresh(self) -> None:
        """Drops all executors; later calls rebuild them from the model's current state."""
        super().refresh()
        self._entries.weights.remember()

    def _expect_load(self, given: Mapping[str, Any], prefix: str = "") -> None:
        """Does nothing, because executors read the model's own tensors."""

    def _slow_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._gate.off is None and not torch.is_grad_enabled():
            return self._untouched(NO_GRADIENTS, args, kwargs)
        # Checks before the call, so that buffers are updated once. The slow path handles a switch
        # to evaluation mode.
        if self._model.training is self._gate.mode and self._entries.weights.changed():
            self._switch_off(CHANGED)
        return super()._slow_path(args, kwargs)

    def _recording(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        every = self._options.verify_every
        checks = every is not None and entry.turn() % every == 0
        return (self._checked if checks else self._recorded)(entry, args, kwargs)

    def _recorded(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the executor in the caller's grad mode."""
        if entry.call is None:  # retired by another thread
            return self._failed(entry, None, args, kwargs)
        try:
            if entry.lends:
                result = lending(entry.call)(*args, **kwargs).give_back()
            else:
                result = entry.call(*args, **kwargs)
        except Exception as error:
            return self._failed(entry, error, args, kwargs)
        entry.hits.tick()
        return result

    def _on_probation(
        self, entry: Entry, probation: Probation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert isinstance(probation, TrainingSmokeCheck)
        fault = probation.fault(args, kwargs)
        # Stays unproved: the fast path would skip the checks of `_slow_path`.
        entry.probation = None
        if fault is None:
            return self._recorded(entry, args, kwargs)
        entry.retire(fault)
        self._entries.warn(f"{fault} ({entry.signature})")
        return self._untouched(fault, args, kwargs, entry)
