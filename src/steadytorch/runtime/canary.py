"""Checks and times the first calls of a stored plan against the untouched model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from threading import Lock
from typing import Any

import msgspec
import torch

from steadytorch.errors import UsageError, one_line
from steadytorch.measure.clock import Clock, HostClock
from steadytorch.measure.race import LOOKS as RACE_LOOKS
from steadytorch.measure.race import Judgement, judge
from steadytorch.runtime.agreement import INCOMPARABLE, SHARED, disagreement, memory_of
from steadytorch.runtime.lending import answer_of

LOOKS = RACE_LOOKS[:3]
"""Numbers of timed pairs at which the race may decide."""
SPACING = 4
"""Calls from one probe to the next, after the first check."""

Run = Callable[[], Any]


class Verdict(msgspec.Struct, frozen=True):
    """The canary's decision on whether a plan may go on serving.

    Attributes:
        kept: whether the plan may go on serving.
        reason: the finding in one clause.
        judgement: the race between tuned and untouched times; None if nothing was timed.
        probes: calls that ran both the executor and the model.
    """

    kept: bool
    reason: str
    judgement: Judgement | None
    probes: int


class _Fault(Exception):  # noqa: N818 - carries a finding, not an error of the canary
    """A fault of the tuned executor."""


class Canary:
    """Checks one executor on the first real calls, and times it against the untouched model.

    First check: the untouched model runs once and the executor twice. In the first check, all
    results must agree, the two tuned results must not share memory, and inputs must be unchanged.
    No tuned result reaches a caller before the first check has passed.

    Probes: after the first check, every `SPACING`-th call runs the executor and the model in random
    order. Each probe measures the synchronised latency of executor and model, and compares their
    results again. Latencies are tested for a difference up to three times, with a total error
    probability of 1 %. A disagreement, an exception or a significantly longer time rejects the
    plan, and the untouched model answers that call.

    Cost of the canary: at most `1 + looks[-1]` extra calls of the untouched model, 28 by default,
    one extra tuned call, and one copy of the inputs.

    Threads: one thread probes at a time, and the other threads do not wait. Other threads run the
    untouched model until the first check has passed, and the executor afterwards. Load from other
    threads slows both timings of a pair alike.

    Bias: the canary compares latency even for plans chosen by throughput. Only the executor runs
    between probes, so caches are slightly warmer for the executor than for the model.

    Args:
        bound: allowed relative L2 error, from `agreement.bound`.
        not_twice: why the model must not run twice for one call (it draws random numbers, or it
            changes buffers); the verdict is then to run untouched. None if it may.
        alias_outputs: whether a later call may overwrite results.
        looks: numbers of timed pairs at which the race may decide, in ascending order.
        spacing: calls from one probe to the next.
        rng: decides which side runs first.
        clock: the clock that times both sides.

    Raises:
        UsageError: `looks` is empty, or `spacing` is below 1.
    """

    def __init__(
        self,
        bound: float,
        *,
        not_twice: str | None = None,
        alias_outputs: bool = False,
        looks: Sequence[int] = LOOKS,
        spacing: int = SPACING,
        rng: Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not looks or spacing < 1:
            raise UsageError(f"a canary needs looks and a spacing of 1 or more, got {spacing}")
        self._bound, self._alias_outputs = bound, alias_outputs
        self._looks, self._spacing = tuple(looks), spacing
        self._rng, self._clock = rng or Random(), clock or HostClock()
        self._turns = count(1)
        self._pairs: list[tuple[float, float]] = []
        self._probes = 0
        self._verified = False
        self._lock = Lock()
        self._verdict: Verdict | None = None
        if not_twice is not None:
            self._settle(False, f"cannot be verified: {not_twice}")

    @property
    def verdict(self) -> Verdict | None:
        """The canary's verdict; None while probing."""
        return self._verdict

    def step(
        self,
        run_tuned: Run,
        run_untouched: Run,
        device: torch.device | str,
        inputs: Sequence[torch.Tensor] = (),
        look: Callable[[], None] = lambda: None,
    ) -> tuple[Any, Verdict | None]:
        """Answers one call.

        Exceptions of the untouched model propagate, and so do exceptions of the executor outside of
        probes. The caller's grad mode is not changed.

        Args:
            run_tuned: runs the executor on this call's inputs.
            run_untouched: runs the model on the same inputs, as without a plan.
            device: the device that does the work; on CUDA, its current stream is synchronised.
            inputs: the tensors among the inputs, needed to detect writes to them.
            look: called before each side when both run; not timed.

        Returns:
            The result, and the verdict or None while probing.
        """
        if self._settled_or_between():
            return self._plain(run_tuned, run_untouched)
        if not self._lock.acquire(blocking=False):
            return self._plain(run_tuned, run_untouched)
        try:
            if self._verdict is not None:  # another thread's, since we looked
                return self._plain(run_tuned, run_untouched)
            if not self._verified:
                result = self._first(run_tuned, run_untouched, inputs, look)
            else:
                result = self._probe(run_tuned, run_untouched, torch.device(device), look)
            return result, self._verdict
        finally:
            self._lock.release()

    def _settled_or_between(self) -> bool:
        if self._verdict is not None:
            return True
        return self._verified and next(self._turns) % self._spacing != 0

    def _plain(self, run_tuned: Run, run_untouched: Run) -> tuple[Any, Verdict | None]:
        verdict = self._verdict
        serves_tuned = self._verified if verdict is None else verdict.kept
        return (run_tuned if serves_tuned else run_untouched)(), verdict

    # -- the first call -------------------------------------------------------------------------

    def _first(
        self,
        run_tuned: Run,
        run_untouched: Run,
        inputs: Sequence[torch.Tensor],
        look: Callable[[], None],
    ) -> Any:
        """Checks the first call; the model runs first, so a result exists if the executor fails."""
        look()
        try:
            saved = [tensor.detach().clone() for tensor in inputs]
        except Exception as error:
            self._settle(False, f"cannot be verified: no copy of the inputs, {one_line(error)}")
            return run_untouched()
        expected = run_untouched()
        self._probes += 1
        look()
        try:
            found = self._checked_twice(run_tuned, expected, inputs, saved)
        except Exception as error:
            self._settle(False, _fault(error))
            return expected
        self._verified = True
        return found

    def _checked_twice(
        self, run_tuned: Run, expected: Any, inputs: Sequence[torch.Tensor], saved: list[Any]
    ) -> Any:
        results = _checked(run_tuned, expected, inputs, saved, self._bound, times=2)
        first, second = (memory_of(answer_of(result)) for result in results)
        # Weights and inputs that the model itself returns do not count as shared memory.
        own = memory_of(answer_of(expected)) | memory_of(inputs)
        if first & second - own and not self._alias_outputs:
            raise _Fault(f"wrong: {SHARED}")
        return results[1]

    # -- probes ---------------------------------------------------------------------------------

    def _probe(
        self,
        run_tuned: Run,
        run_untouched: Run,
        device: torch.device,
        look: Callable[[], None],
    ) -> Any:
        look()
        tuned = None
        if self._rng.random() < 0.5:
            tuned = self._try(run_tuned, device)
            look()
        try:
            expected, untouched_ns = self._timed(run_untouched, device)
        except Exception:
            if not isinstance(tuned, tuple):
                raise
            tuned = None  # frees its memory, which the model may have lacked; retries once
            expected = run_untouched()
            self._settle(
                True, "not timed: the untouched model raised with a tuned result in memory"
            )
            return expected
        self._probes += 1
        if tuned is None:
            look()
            tuned = self._try(run_tuned, device)
        try:
            if isinstance(tuned, _Fault):
                raise tuned
            found, tuned_ns = tuned
            _compare(found, expected, self._bound)
            self._pairs.append((float(max(untouched_ns, 1)), float(max(tuned_ns, 1))))
            self._look()
        except Exception as error:
            self._settle(False, _fault(error))
            return expected
        return found if self._verdict is None or self._verdict.kept else expected

    def _try(self, run_tuned: Run, device: torch.device) -> tuple[Any, int] | _Fault:
        try:
            return self._timed(lambda: _run(run_tuned), device)
        except Exception as error:
            return error if isinstance(error, _Fault) else _Fault(_fault(error))

    def _timed(self, run: Run, device: torch.device) -> tuple[Any, int]:
        """Returns the result and its latency in ns; synchronises the stream before and after."""
        wait = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else _no_wait
        wait()
        start = self._clock.now_ns()
        result = run()
        wait()
        return result, self._clock.now_ns() - start

    def _look(self) -> None:
        if len(self._pairs) not in self._looks:
            return
        judgement = judge(self._pairs, looks=self._looks)
        if judgement.verdict == "slower":
            self._settle(False, _slower(judgement), judgement)
        elif judgement.verdict != "undecided" or len(self._pairs) == self._looks[-1]:
            self._settle(True, _kept(judgement), judgement)

    def _settle(self, kept: bool, reason: str, judgement: Judgement | None = None) -> None:
        self._verdict = Verdict(kept, reason, judgement, self._probes)


class Recheck:
    """Compares single calls of an executor that passed its first checks with the untouched model.

    Args:
        bound: allowed relative L2 error, from `agreement.bound`.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._calls = 0

    def step(
        self,
        run_tuned: Run,
        run_untouched: Run,
        device: torch.device | str,
        inputs: Sequence[torch.Tensor] = (),
        look: Callable[[], None] = lambda: None,
    ) -> tuple[Any, Verdict | None]:
        """Answers one call, as `Canary.step` does, without timing it.

        If memory does not suffice for both results, the executor answers the call unchecked.

        Returns:
            The result, and a verdict if the two answers disagree.
        """
        look()
        try:
            saved = [tensor.detach().clone() for tensor in inputs]
            expected = run_untouched()
        except torch.OutOfMemoryError:
            look()
            return run_tuned(), None
        look()
        self._calls += 1
        try:
            (found,) = _checked(run_tuned, expected, inputs, saved, self._bound, times=1)
        except Exception as error:
            if not _is_out_of_memory(error):
                return expected, Verdict(False, _fault(error), None, self._calls)
            del expected
        else:
            return found, None
        return run_tuned(), None


def _checked(
    run_tuned: Run,
    expected: Any,
    inputs: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    limit: float,
    times: int,
) -> list[Any]:
    """Runs the executor `times` times; returns the results if all agree with `expected`.

    Raises:
        _Fault: a result is wrong or cannot be verified; the inputs are restored first.
    """
    if _differ(inputs, saved):
        raise _Fault("cannot be verified: the untouched model writes to its inputs")
    try:
        results = [_run(run_tuned) for _ in range(times)]
    finally:
        written = _differ(inputs, saved)
        if written:
            _restore(inputs, saved)
    if written:
        raise _Fault("wrong: the tuned executor writes to its inputs")
    for result in results:
        _compare(result, expected, limit)
    return results


def _is_out_of_memory(error: Exception) -> bool:
    return any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__cause__))


def _compare(found: Any, expected: Any, limit: float) -> None:
    fault = disagreement(answer_of(found), answer_of(expected), limit)
    if fault is not None:
        kind = "cannot be verified" if fault.endswith(INCOMPARABLE) else "wrong"
        raise _Fault(f"{kind}: {fault}")


def _no_wait() -> None:
    """Does nothing: work on the CPU is done when the call returns."""


def _differ(tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> bool:
    return any(
        # `disagreement` treats NaN as equal to NaN.
        not torch.equal(now, then) and disagreement(now, then, 0.0, strides=False) is not None
        for now, then in zip(tensors, saved, strict=True)
    )


def _restore(tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():  # only here can inference tensors be written too
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


def _run(run_tuned: Run) -> Any:
    try:
        return run_tuned()
    except Exception as error:
        raise _Fault(f"the tuned executor raised {one_line(error)}") from error


def _fault(error: Exception) -> str:
    return str(error) if isinstance(error, _Fault) else f"could not be checked: {one_line(error)}"


def _slower(judgement: Judgement) -> str:
    return f"slower than the untouched model: {_effect(judgement)}"


def _kept(judgement: Judgement) -> str:
    if judgement.verdict != "undecided":
        return f"{judgement.verdict} against the untouched model: {_effect(judgement)}"
    return (
        f"not shown to be slower than the untouched model: {_effect(judgement)}; "
        f"{judgement.mde or 0:.1%} more would have been found"
    )


def _effect(judgement: Judgement) -> str:
    interval = ""
    if judgement.low is not None and judgement.high is not None:
        interval = f" ({judgement.low:+.1%} to {judgement.high:+.1%})"
    return f"{judgement.estimate or 0:+.1%} time{interval} in {judgement.pairs} pairs"
