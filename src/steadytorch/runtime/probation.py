"""Checks the first calls of an executor for state changes, buffer writes and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch

from steadytorch.rewrite.copying import MOST_OWN_BYTES
from steadytorch.runtime.canary import Canary, Recheck, Verdict
from steadytorch.runtime.executors import Executor
from steadytorch.runtime.faults import Raised, is_callers
from steadytorch.runtime.state import DRAWS, KEEPS_STATE, Draws, State
from steadytorch.runtime.weights import Weights
from steadytorch.workload.hooks import hooks_of

WRITES = "the model writes to its own buffers when called"

Run = Callable[[], Any]


class WatchedAnswer(NamedTuple):
    """The answer to a call that was checked for side effects.

    Attributes:
        result: the caller's result.
        settled: whether watching is over.
        fault: why the executor must not be called again, or None.
        of_model: whether the fault holds for every executor of the model.
        tuned: whether the executor computed the result.
        finding: the canary's verdict, or None.
    """

    result: Any
    settled: bool
    fault: str | None = None
    of_model: bool = False
    tuned: bool = True
    finding: Verdict | None = None


class StateWatch:
    """Detects state changes that calls leave in a model and its copies.

    Random numbers are checked at the first call only, because other threads advance the same
    generators.
    """

    def __init__(
        self, executor: Executor, weights: Weights, device: torch.device, is_first: bool = True
    ) -> None:
        self._weights = weights
        # Larger plain tensors are taken for weights, which forward does not write to.
        self._state = State(executor.modules, keep=True, most=MOST_OWN_BYTES)
        self._draws = Draws(device) if is_first else None

    def fault(self) -> str | None:
        """Returns why the executor must not run again, or None if calls changed no state."""
        if self._state.changed():
            return WRITES if self._weights.rewritten() else KEEPS_STATE
        return DRAWS if self._draws is not None and self._draws.happened() else None

    def undo(self) -> None:
        """Restores the model state and the random generators to the snapshot."""
        self._state.restore()
        if self._draws is not None:
            self._draws.undo()


class FirstCall:
    """Checks one call of an executor for state changes that persist after the call.

    Args:
        executor: the executor to watch.
        weights: the model's weights when the executor was built.
        device: the device of the executor.
    """

    def __init__(self, executor: Executor, weights: Weights, device: torch.device) -> None:
        self._executor, self._weights, self._device = executor, weights, device

    def answer(
        self, run_tuned: Run, run_untouched: Run, inputs: list[torch.Tensor]
    ) -> WatchedAnswer:
        """Answers one call.

        State that the model itself changed is kept. State changed in a copy is discarded, as are
        writes to the model by hooks of a copy. The untouched model then answers the call.

        Raises:
            Exception: exceptions of the executor propagate, and of the model if it had to answer.
        """
        model, *copies = self._executor.modules
        # A hook may write attributes that `forward` reads; a copy reads its own attributes.
        hooked = bool(copies) and any(map(hooks_of, model.modules()))
        own = State([model], keep=hooked, most=MOST_OWN_BYTES)
        others, draws = State(copies), Draws(self._device)
        result = run_tuned()
        writes, changed, drawn = self._weights.rewritten(), own.changed(), draws.happened()
        if writes or (changed and not own.restorable):
            own.mend()
            return WatchedAnswer(result, True, WRITES if writes else KEEPS_STATE, True)
        keeps = changed or others.changed()
        if not (keeps or drawn):
            return WatchedAnswer(result, True)
        if changed:
            own.restore()
        if drawn:
            draws.undo()
        return WatchedAnswer(run_untouched(), True, KEEPS_STATE if keeps else DRAWS, True, False)


class CanaryProbation:
    """Compares first calls with the untouched model (a canary), and checks for state changes.

    Some models change their state only in a branch that is first taken after many calls. Every call
    that runs both the executor and the model is therefore checked for state changes. A call that
    runs only the executor gets the lighter check that all later calls get.

    Args:
        executor: the executor to watch.
        weights: the model's weights when the executor was built.
        device: the device of the executor.
        canary: compares both sides; probation lasts until it gives a verdict.
        outdated: whether a call used old weights or left state in a copy; None if the executor runs
            the model itself.
        draws: whether random numbers drawn during the first call count as the model's.
    """

    def __init__(
        self,
        executor: Executor,
        weights: Weights,
        device: torch.device,
        canary: Canary | Recheck,
        outdated: Callable[[], bool] | None,
        draws: bool = True,
    ) -> None:
        self._watched = executor, weights, device
        self._weights, self._device, self._canary = weights, device, canary
        self._outdated = outdated
        self._is_first = draws
        self._fault: str | None = None

    def answer(
        self, run_tuned: Run, run_untouched: Run, inputs: list[torch.Tensor]
    ) -> WatchedAnswer:
        """Answers one call; if both executor and model run, the model's state is updated only once.

        Raises:
            Exception: exceptions of the untouched model propagate, and of the executor outside of
                probes.
            Raised: carries an exception meant for the caller.
        """
        executor = self._watched[0]

        def callers(error: Exception) -> bool:
            return is_callers(error, executor.modules, executor.is_live)

        call = _Sides(run_tuned, run_untouched, self._watching, self._fault, callers)
        # An executor that runs the model stays valid after outside writes to the weights.
        versions = self._versions() if self._outdated is None else None
        result, verdict = self._canary.step(
            call.tuned, call.untouched, self._device, inputs, call.look
        )
        if call.watch is not None:
            call.look()
        elif call.ran == ["tuned"]:
            if self._rewritten(versions):  # only one side ran, so its result stands
                State(self._watched[0].modules[:1]).mend()
                return WatchedAnswer(result, True, WRITES, True)
            if self._outdated is not None and self._outdated():
                call.fault = KEEPS_STATE
        self._fault = call.fault
        if call.fault is not None:
            # An answer that the model gave before its state was restored is correct.
            answer = call.of_model[0] if call.of_model else run_untouched()
            return WatchedAnswer(answer, True, call.fault, True, False)
        if verdict is None:
            return WatchedAnswer(result, False, tuned="tuned" in call.ran)
        fault = None if verdict.kept else verdict.reason
        return WatchedAnswer(result, True, fault, False, verdict.kept, verdict)

    def _versions(self) -> list[int]:
        model = self._watched[0].modules[0]
        tensors = chain(model.parameters(), model.buffers())
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def _rewritten(self, versions: list[int] | None) -> bool:
        return self._weights.rewritten() if versions is None else self._versions() != versions

    def _watching(self) -> StateWatch:
        is_first, self._is_first = self._is_first, False
        return StateWatch(*self._watched, is_first)


class _Sides:
    """One call with two sides, executor and model: which sides ran, and the state they changed.

    Args:
        run_tuned: runs the executor.
        run_untouched: runs the model.
        watching: begins to watch.
        fault: a fault found earlier, which keeps the executor from running; or None.
        is_callers: whether an exception of the executor is meant for the caller; see `faults`.

    Attributes:
        ran: the sides that ran, in order.
        of_model: a list with the model's answer, empty before.
        watch: the watch of a call answered by both sides; else None.
    """

    def __init__(
        self,
        run_tuned: Run,
        run_untouched: Run,
        watching: Callable[[], StateWatch],
        fault: str | None,
        is_callers: Callable[[Exception], bool],
    ) -> None:
        self._is_callers = is_callers
        self._run_tuned, self._run_untouched, self._watching = run_tuned, run_untouched, watching
        self.fault = fault
        self.watch: StateWatch | None = None
        self.ran: list[str] = []
        self.of_model: list[Any] = []

    def tuned(self) -> Any:
        if self.fault is not None:
            raise RuntimeError(self.fault)  # the canary lets the model answer
        self.ran.append("tuned")
        try:
            return self._run_tuned()
        except Exception as error:
            if self._is_callers(error):
                raise Raised(error) from error
            raise

    def untouched(self) -> Any:
        self.ran.append("untouched")
        self.of_model = [self._run_untouched()]
        return self.of_model[0]

    def look(self) -> None:
        """Takes a snapshot on the first call; later calls check for and undo state changes."""
        if self.watch is None:
            self.watch = self._watching()
        elif self.fault is None:
            self.fault = self.watch.fault()
            if self.fault is not None and self.ran[-1:] == ["tuned"]:
                self.watch.undo()
