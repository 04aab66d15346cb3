"""The first calls of an executor, watched: what only the real model and inputs can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from steadytorch.runtime.canary import Canary, Verdict
from steadytorch.runtime.executors import Executor
from steadytorch.runtime.state import DRAWS, KEEPS_STATE, Draws, State
from steadytorch.runtime.weights import Weights

WRITES = "the model writes to its own buffers when called"

Run = Callable[[], Any]


class Outcome(NamedTuple):
    """The answer to a watched call.

    Attributes:
        result: for the caller.
        settled: whether watching is over.
        fault: why the executor must not be called again, or None.
        of_model: whether that holds for every executor of the model.
        tuned: whether the executor gave the result.
        finding: what the canary found.
    """

    result: Any
    settled: bool
    fault: str | None = None
    of_model: bool = False
    tuned: bool = True
    finding: Verdict | None = None


class FirstCall:
    """Lets the executor answer once, and looks at what that left behind.

    Args:
        executor: to be watched.
        weights: of the model, as they were when it was built.
        device: where it runs.
    """

    def __init__(self, executor: Executor, weights: Weights, device: torch.device) -> None:
        self._executor, self._weights, self._device = executor, weights, device

    def answer(self, run_tuned: Run, run_untouched: Run, inputs: list[torch.Tensor]) -> Outcome:
        """One call: the state that the model itself changed stays; that of a copy is thrown away.

        Raises:
            Exception: of the executor, or of the untouched model where that had to answer.
        """
        model, *copies = self._executor.modules
        own, others, draws = State([model]), State(copies), Draws(self._device)
        result = run_tuned()
        writes = self._weights.changed()
        if writes or own.changed():
            own.mend()
            return Outcome(result, True, WRITES if writes else KEEPS_STATE, True)
        if others.changed():
            return Outcome(run_untouched(), True, KEEPS_STATE, True, False)
        if draws.happened():
            draws.undo()
            return Outcome(run_untouched(), True, DRAWS, True, False)
        return Outcome(result, True)


class OnTrial:
    """Has the canary check and time the executor against the model on the first calls.

    Args:
        executor: to be watched.
        weights: of the model, as they were when it was built.
        device: where it runs.
        canary: for this executor.
    """

    def __init__(
        self, executor: Executor, weights: Weights, device: torch.device, canary: Canary
    ) -> None:
        self._model, self._weights, self._device = executor.modules[0], weights, device
        self._canary = canary
        self._watched = False
        self._fault: str | None = None

    def answer(self, run_tuned: Run, run_untouched: Run, inputs: list[torch.Tensor]) -> Outcome:
        """One call; the first one of the model is watched before the executor may run.

        Raises:
            Exception: of the untouched model, or of the executor in a call that is no probe.
        """
        served = []

        def tuned() -> Any:
            if self._fault is not None:
                raise RuntimeError(self._fault)  # the canary lets the model answer
            served.append(True)
            return run_tuned()

        def untouched() -> Any:
            return run_untouched() if self._watched else self._watch(run_untouched)

        result, verdict = self._canary.step(tuned, untouched, self._device, inputs)
        if self._fault is not None:
            return Outcome(result, True, self._fault, True, False)
        if verdict is None:
            return Outcome(result, False, tuned=bool(served))
        fault = None if verdict.kept else verdict.reason
        return Outcome(result, True, fault, False, verdict.kept, verdict)

    def _watch(self, run_untouched: Run) -> Any:
        state, draws = State([self._model]), Draws(self._device)
        result = run_untouched()
        if self._weights.changed():
            self._fault = WRITES
        elif state.changed():
            self._fault = KEEPS_STATE
        elif draws.happened():
            self._fault = DRAWS
        self._watched = True
        return result
