"""Time several ways to compute one convolution side by side, each recorded as a CUDA graph.

A graph replay takes one launch, so host overhead does not affect the times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch.conv.blocks import REPEATS, Flush, Lead, block_ns
from steadytorch.conv.check import ProblemTensors
from steadytorch.conv.choices import ATEN
from steadytorch.errors import UnsupportedError, one_line
from steadytorch.measure.race import race
from steadytorch.results.conv import Measured

BENCHMARK = "aten, benchmark mode"
"""PyTorch's choice in benchmark mode. It is shown but never chosen, because it cannot be stored."""
NOISE = 0.01
"""Medians closer than this count as equal. The same engine differs by up to 0.55 % between
processes, and events resolve 0.5 us of about 20 us."""
SCREEN_ROUNDS = 4
FAR_BEHIND = 1.1
"""Only the incumbent and arms within this factor of the fastest arm go on to the race."""
HOPELESS = 2.0
"""Engines slower than this multiple of the fastest drop out after one run, and after the first
screening round. For resnet50 at batch 64 on an H200, 13 % of the engines are that slow. Those over
three times took 61 % of the time of all runs, though each had only one block."""
RACE_LOOKS = (12, 18, 27)


def device_answers() -> bool:
    """Whether CUDA still works in this process; after an illegal memory access it does not."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def barred(found: Measured, fault: Exception) -> Measured:
    """Mark an engine that raised as excluded; the exception's message becomes the reason.

    Raises:
        UnsupportedError: the fault made the device unusable for this process.
    """
    reason = one_line(fault)
    if not device_answers():
        raise UnsupportedError(f"{found.choice} made the device unusable ({reason})") from None
    return msgspec.structs.replace(found, excluded=reason)


class Arm:
    """One way to compute the convolution: a built cuDNN plan, or PyTorch's implementation.

    Args:
        found: its measurements so far.
        run: enqueues it on the current stream.
        thread: thread to record it on; None for the caller's.
        keep: objects whose memory it uses by address.
    """

    def __init__(
        self,
        found: Measured,
        run: Callable[[], Any],
        thread: WorkThread | None = None,
        keep: Any = None,
    ) -> None:
        self.found, self.run, self._thread, self._keep = found, run, thread, keep
        self.times_ns: list[float] = []

    def record(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Warm up the arm, then record it as a CUDA graph on `stream` with memory from `pool`."""
        if self._thread is None:
            self._record(stream, pool)
            return
        try:
            self._thread.run(lambda: self._record(stream, pool))
        finally:
            self._thread.close()

    def _record(self, stream: torch.cuda.Stream, pool: Any) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            self.run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which runs the garbage collector and empties the cache.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.run()
            finally:
                graph.capture_end()
        self.run = graph.replay

    def block_ns(self, flush: Flush | None, lead: Lead, repeats: int = REPEATS) -> float:
        """Median time of a run in one block of runs, in ns; see `blocks.block_ns`."""
        return block_ns(self.run, flush, lead, repeats)

    def summary(self) -> Measured:
        """The arm's measurements; they include times unless the arm is excluded."""
        if self.found.excluded is not None:
            return self.found
        low, median, high = np.quantile(self.times_ns, [0.25, 0.5, 0.75])
        return msgspec.structs.replace(
            self.found,
            median_ns=float(median),
            spread=float((high - low) / 2 / median) if len(self.times_ns) > 1 else None,
            runs=len(self.times_ns),
        )


def by_pytorch(given: ProblemTensors, error: float) -> list[Arm]:
    """Make two candidates (arms) that run PyTorch's convolution: default and benchmark mode.

    PyTorch caches its choice of algorithm per thread, so each arm gets a new thread.
    """

    def benchmarked() -> None:
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, True
        try:
            given.by_pytorch()
        finally:
            cudnn.benchmark = before

    return [
        Arm(Measured(ATEN, error=error), given.by_pytorch, WorkThread()),
        Arm(Measured(BENCHMARK, error=error), benchmarked, WorkThread()),
    ]


class WorkThread:
    """A thread that runs functions, one at a time."""

    def __init__(self) -> None:
        self._work: Callable[[], Any] | None = None
        self._error: BaseException | None = None
        self._ready, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._loop, daemon=True).start()

    def run(self, work: Callable[[], Any]) -> None:
        """Run a function on the thread and wait for it; its exceptions propagate."""
        self._work, self._error = work, None
        self._ready.release()
        self._done.acquire()
        # Drop the reference: an exception keeps frames, and they keep tensors.
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Stop the thread."""
        self._work = None
        self._ready.release()

    def _loop(self) -> None:
        while True:
            self._ready.acquire()
            if self._work is None:
                return
            try:
                self._work()
            except BaseException as error:
                self._error = error
            self._done.release()


def record_all(arms: Sequence[Arm]) -> list[Arm]:
    """Warm up and record arms.

    Returns:
        The arms that can be timed; the others are excluded with their reason.

    Raises:
        UnsupportedError: a fault made the device unusable.
    """
    recorded: list[Arm] = []
    place: tuple[torch.cuda.Stream, Any] | None = None
    for arm in arms:
        place = place or (torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        try:
            arm.record(*place)
        except Exception as fault:
            arm.found = barred(arm.found, fault)
            # The failed capture may still hold the stream and the pool.
            place = None
        else:
            recorded.append(arm)
    return recorded


def promising(arms: Sequence[Arm], flush: Flush | None, incumbent: str | None = None) -> list[Arm]:
    """Time one run of each engine; keep those within `HOPELESS` times the fastest.

    The run of an engine that is not kept is its only measurement. PyTorch's own arms are kept
    untimed, and the incumbent is kept however slow it is.

    Args:
        arms: arms that are not recorded yet; an engine that raises is excluded with the reason.
        flush: called before each run; None for a warm cache.
        incumbent: the earlier choice.

    Raises:
        UnsupportedError: a fault made the device unusable.
    """
    engines = [arm for arm in arms if arm.found.choice not in (ATEN, BENCHMARK)]
    lead, first_ns = Lead(), dict[Arm, float]()
    for arm in engines:
        with suppress(_ArmError):
            first_ns[arm] = _block_ns(arm, flush, lead, 1)
    bound = HOPELESS * min(first_ns.values(), default=0.0)
    for arm, ns in first_ns.items():
        if ns > bound and arm.found.choice != incumbent:
            arm.times_ns.append(ns)
    return [arm for arm in arms if arm.found.excluded is None and not arm.times_ns]


def take_rounds(
    arms: Sequence[Arm],
    flush: Flush | None,
    rng: Random,
    stop: Callable[[], bool],
    incumbent: str | None = None,
) -> None:
    """Time all candidates (arms) in screening rounds, then race those near the fastest.

    PyTorch's own arms take part in every screening round, because their times are reported. The
    incumbent always enters the race, because replacing it requires paired measurements. If an arm
    raises, it is excluded with the reason, and the race restarts without it.

    Args:
        arms: recorded arms; their `times_ns` are filled in the order of the rounds.
        flush: called before each run; None for a warm cache.
        rng: randomises the order within a round.
        stop: polled before each round of the race; True ends it.
        incumbent: the earlier choice.

    Raises:
        UnsupportedError: a fault made the device unusable.
    """
    screened, lead = list(arms), Lead()
    for _ in range(SCREEN_ROUNDS):
        for arm in rng.sample(screened, len(screened)):
            with suppress(_ArmError):
                arm.times_ns.append(_block_ns(arm, flush, lead))
        screened = _within(HOPELESS, screened, (ATEN, BENCHMARK, incumbent))
    while near := _within(FAR_BEHIND, arms, (incumbent,)):
        blocks = [lambda arm=arm: _block_ns(arm, flush, lead) for arm in near]
        with suppress(_ArmError):
            result = race(blocks, rng=rng, looks=RACE_LOOKS, tie=NOISE, stop=stop)
            for arm, times in zip(near, result.times, strict=True):
                arm.times_ns.extend(times)
            return


class _ArmError(Exception):
    """An arm raised an exception and has been excluded."""


def _block_ns(arm: Arm, flush: Flush | None, lead: Lead, repeats: int = REPEATS) -> float:
    try:
        return arm.block_ns(flush, lead, repeats)
    except Exception as fault:
        arm.found = barred(arm.found, fault)
        raise _ArmError from fault


def _within(factor: float, arms: Sequence[Arm], kept: Sequence[str | None]) -> list[Arm]:
    """Arms whose median time is within `factor` of the fastest, or whose choice is in `kept`."""
    medians = {arm: float(np.median(arm.times_ns)) for arm in arms if arm.found.excluded is None}
    fastest = min(medians.values(), default=0.0)
    return [
        arm
        for arm, median in medians.items()
        if median <= factor * fastest or arm.found.choice in kept
    ]
