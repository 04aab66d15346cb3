"""The first calls of an executor, watched: what only the real model and inputs can show."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch

from steadytorch.rewrite.copying import MOST_OWN_BYTES
from steadytorch.rewrite.hooks import hooks_of
from steadytorch.runtime.canary import Canary, Recheck, Verdict
from steadytorch.runtime.executors import Executor
from steadytorch.runtime.faults import Raised, is_callers
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


class _Watch:
    """Looks at what calls from now on leave behind in a model and its copies.

    Draws are looked at for the first call alone: those of other threads look like the model's.
    """

    def __init__(
        self, executor: Executor, weights: Weights, device: torch.device, is_first: bool = True
    ) -> None:
        self._weights = weights
        # More than this are weights in disguise, which no forward writes to.
        self._state = State(executor.modules, keep=True, most=MOST_OWN_BYTES)
        self._draws = Draws(device) if is_first else None

    def fault(self) -> str | None:
        if self._state.changed():
            return WRITES if self._weights.rewritten() else KEEPS_STATE
        return DRAWS if self._draws is not None and self._draws.happened() else None

    def undo(self) -> None:
        self._state.restore()
        if self._draws is not None:
            self._draws.undo()


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

        So is what hooks of a copy wrote to the model, and the model answers.

        Raises:
            Exception: of the executor, or of the untouched model where that had to answer.
        """
        model, *copies = self._executor.modules
        # A hook may write what `forward` reads, and that of a copy reads its own.
        hooked = bool(copies) and any(map(hooks_of, model.modules()))
        own = State([model], keep=hooked, most=MOST_OWN_BYTES)
        others, draws = State(copies), Draws(self._device)
        result = run_tuned()
        writes, changed, drawn = self._weights.rewritten(), own.changed(), draws.happened()
        if writes or (changed and not own.restorable):
            own.mend()
            return Outcome(result, True, WRITES if writes else KEEPS_STATE, True)
        keeps = changed or others.changed()
        if not (keeps or drawn):
            return Outcome(result, True)
        if changed:
            own.restore()
        if drawn:
            draws.undo()
        return Outcome(run_untouched(), True, KEEPS_STATE if keeps else DRAWS, True, False)


class OnTrial:
    """Has the canary check and time the executor against the model on the first calls.

    A model that leaves something behind in one of its branches may take that one late. So a call
    that both answer is watched, each time; one that the executor alone answers is looked at as are
    all calls later on.

    Args:
        executor: to be watched.
        weights: of the model, as they were when it was built.
        device: where it runs.
        canary: for this executor; one that never gives a verdict keeps it on trial.
        outdated: whether a call was of other weights, or left something behind in a copy; None
            where the executor runs the model itself.
        draws: whether random numbers that are drawn during the first call count as the model's.
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

    def answer(self, run_tuned: Run, run_untouched: Run, inputs: list[torch.Tensor]) -> Outcome:
        """One call; whatever the model remembers of it, it remembers once.

        Raises:
            Exception: of the untouched model, or of the executor in a call that is no probe.
            Raised: an exception that is the caller's.
        """
        executor = self._watched[0]

        def callers(error: Exception) -> bool:
            return is_callers(error, executor.modules, executor.is_live)

        call = _Sides(run_tuned, run_untouched, self._watching, self._fault, callers)
        # One that runs the model may go on after others have written to the weights.
        versions = self._versions() if self._outdated is None else None
        result, verdict = self._canary.step(
            call.tuned, call.untouched, self._device, inputs, call.look
        )
        if call.watch is not None:
            call.look()
        elif call.ran == ["tuned"]:
            if self._rewritten(versions):  # by this call, once
                State(self._watched[0].modules[:1]).mend()
                return Outcome(result, True, WRITES, True)
            if self._outdated is not None and self._outdated():
                call.fault = KEEPS_STATE
        self._fault = call.fault
        if call.fault is not None:
            # An answer that came before the model was put back is the right one.
            answer = call.of_model[0] if call.of_model else run_untouched()
            return Outcome(answer, True, call.fault, True, False)
        if verdict is None:
            return Outcome(result, False, tuned="tuned" in call.ran)
        fault = None if verdict.kept else verdict.reason
        return Outcome(result, True, fault, False, verdict.kept, verdict)

    def _versions(self) -> list[int]:
        model = self._watched[0].modules[0]
        tensors = chain(model.parameters(), model.buffers())
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def _rewritten(self, versions: list[int] | None) -> bool:
        return self._weights.rewritten() if versions is None else self._versions() != versions

    def _watching(self) -> _Watch:
        is_first, self._is_first = self._is_first, False
        return _Watch(*self._watched, is_first)


class _Sides:
    """One call on trial: which side ran, and what that left behind.

    Args:
        run_tuned: the executor's side.
        run_untouched: the model's.
        watching: begins to watch.
        fault: found before, or None; then the executor does not run.
        is_callers: whether an exception of the executor is for the caller, see `faults`.

    Attributes:
        ran: the sides that did, in order.
        of_model: the model's answer, once there is one.
        watch: of a call that both answer.
    """

    def __init__(
        self,
        run_tuned: Run,
        run_untouched: Run,
        watching: Callable[[], _Watch],
        fault: str | None,
        is_callers: Callable[[Exception], bool],
    ) -> None:
        self._is_callers = is_callers
        self._run_tuned, self._run_untouched, self._watching = run_tuned, run_untouched, watching
        self.fault = fault
        self.watch: _Watch | None = None
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
        """Begins to watch, and then says what the sides left; puts back what the tuned one did."""
        if self.watch is None:
            self.watch = self._watching()
        elif self.fault is None:
            self.fault = self.watch.fault()
            if self.fault is not None and self.ran[-1:] == ["tuned"]:
                self.watch.undo()
