"""The first calls under a stored plan, checked and timed against the untouched model."""

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
"""Numbers of timed pairs at which a verdict may be given."""
SPACING = 4
"""After the first check, every so many calls one is a probe."""

Run = Callable[[], Any]


class Verdict(msgspec.Struct, frozen=True):
    """What the canary found.

    Attributes:
        kept: whether the plan may go on serving.
        reason: the finding in one clause.
        judgement: of the tuned times against the untouched ones; None without any.
        probes: calls that ran both.
    """

    kept: bool
    reason: str
    judgement: Judgement | None
    probes: int


class _Found(Exception):  # noqa: N818 - carries a finding, and is no fault of the canary's
    """A fault of the tuned executor, in words."""


class Canary:
    """Checks one executor on the real inputs of the first calls, and times it against the model.

    The first call runs the untouched model once and the executor twice: results must agree, the
    second must not stand in the memory of the first, inputs must be left as they were. Until such
    a call has gone well, nothing tuned is given out. From then on every `SPACING`-th call is a
    probe: both run, in random order, each timed as synchronised latency, and compared again. The
    pairs are judged as in every race, at up to three looks with an error of 1 % in all.
    Disagreement, an exception or a time shown to be longer demotes the plan; the call in which it
    happens is answered by the untouched model.

    At most `1 + looks[-1]` untouched calls (28) and one tuned call are made in excess, and the
    inputs are copied once.

    One thread probes at a time. Others do not wait: before the first check has gone well they are
    served untouched, because nothing unverified may reach a caller; after it they are served tuned,
    as calls between probes are. Their work falls on both arms of a pair alike.

    Synchronised latency is what is compared, also for plans chosen by throughput; between probes
    the executor runs alone, so that caches are a little warmer for it than for the model.

    Args:
        bound: relative L2 error allowed, from `agreement.bound`.
        not_twice: why the model must not be called twice for one call (it draws random numbers, it
            changes buffers); it then runs untouched, and that is the verdict. None if it may.
        alias_outputs: whether results may stand in memory that a later call overwrites.
        looks: numbers of timed pairs at which a verdict may be given, rising.
        spacing: calls from one probe to the next.
        rng: decides which of the two runs first.
        clock: where times come from.

    Raises:
        UsageError: no looks, or a spacing below 1.
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
        """What was found; None while probing."""
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

        Exceptions of the untouched model are the caller's; so are those of the executor on calls
        that are not probes. Neither function's grad mode is touched.

        Args:
            run_tuned: runs the executor on this call's inputs.
            run_untouched: runs the model on them, as it would be served without the plan.
            device: where the work is done; on CUDA its current stream is synchronised.
            inputs: the tensors among the inputs; without them, writing to inputs goes unseen.
            look: is called where both run, before the one and before the other; not timed.

        Returns:
            The result, and the verdict once there is one.
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
        """Untouched first: whatever the executor does to the process, an answer is there."""
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
        # What the model itself hands out again, a weight or an input, is not the executor's buffer.
        own = memory_of(answer_of(expected)) | memory_of(inputs)
        if first & second - own and not self._alias_outputs:
            raise _Found(f"wrong: {SHARED}")
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
            tuned = None  # its memory may be what the model lacked; if not, the next line raises
            expected = run_untouched()
            self._settle(True, "not timed: beside a tuned result the untouched model raised")
            return expected
        self._probes += 1
        if tuned is None:
            look()
            tuned = self._try(run_tuned, device)
        try:
            if isinstance(tuned, _Found):
                raise tuned
            found, tuned_ns = tuned
            _compare(found, expected, self._bound)
            self._pairs.append((float(max(untouched_ns, 1)), float(max(tuned_ns, 1))))
            self._look()
        except Exception as error:
            self._settle(False, _fault(error))
            return expected
        return found if self._verdict is None or self._verdict.kept else expected

    def _try(self, run_tuned: Run, device: torch.device) -> tuple[Any, int] | _Found:
        try:
            return self._timed(lambda: _run(run_tuned), device)
        except Exception as error:
            return error if isinstance(error, _Found) else _Found(_fault(error))

    def _timed(self, run: Run, device: torch.device) -> tuple[Any, int]:
        """The result and its latency in ns, the queue of the device empty before and after."""
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
    """Compares single calls of an executor that has proved itself with the untouched model's.

    Args:
        bound: relative L2 error allowed, from `agreement.bound`.
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
        """Answers one call, as `Canary.step`; nothing is timed.

        Without the memory for both answers nothing is compared, and the executor answers.

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
    """What the executor answers, so many times, where that is right.

    Raises:
        _Found: it is not, or nothing can be said of it; inputs are as they were, then too.
    """
    if _differ(inputs, saved):
        raise _Found("cannot be verified: the untouched model writes to its inputs")
    try:
        results = [_run(run_tuned) for _ in range(times)]
    finally:
        written = _differ(inputs, saved)
        if written:
            _restore(inputs, saved)
    if written:
        raise _Found("wrong: the tuned executor writes to its inputs")
    for result in results:
        _compare(result, expected, limit)
    return results


def _is_out_of_memory(error: Exception) -> bool:
    return any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__cause__))


def _compare(found: Any, expected: Any, limit: float) -> None:
    fault = disagreement(answer_of(found), answer_of(expected), limit)
    if fault is not None:
        kind = "cannot be verified" if fault.endswith(INCOMPARABLE) else "wrong"
        raise _Found(f"{kind}: {fault}")


def _no_wait() -> None:
    """Work on the CPU is done when its call returns."""


def _differ(tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> bool:
    return any(
        # NaN equals NaN.
        not torch.equal(now, then) and disagreement(now, then, 0.0, strides=False) is not None
        for now, then in zip(tensors, saved, strict=True)
    )


def _restore(tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():  # the only mode in which all kinds of tensors can be written to
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


def _run(run_tuned: Run) -> Any:
    try:
        return run_tuned()
    except Exception as error:
        raise _Found(f"the tuned executor raised {one_line(error)}") from error


def _fault(error: Exception) -> str:
    return str(error) if isinstance(error, _Found) else f"could not be checked: {one_line(error)}"


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
