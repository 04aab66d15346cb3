"""Timing ways to compute one convolution beside each other, each recorded as a CUDA graph.

A recorded run is one launch, so that what is timed is the device and not the host that feeds it.
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

from steadytorch.conv.blocks import Flush, Lead, block_ns
from steadytorch.conv.check import Operands
from steadytorch.conv.choices import ATEN
from steadytorch.errors import UnsupportedError, one_line
from steadytorch.measure.race import race
from steadytorch.results.conv import Measured

BENCHMARK = "aten, benchmark mode"
"""PyTorch's choice with its benchmark mode on: shown, not chosen, since nothing keeps it."""
NOISE = 0.01
"""Medians closer than this are one: between processes the same engine differs by up to 0.55 %, and
within one, events resolve 0.5 us of some 20."""
SCREEN_ROUNDS = 4
FAR_BEHIND = 1.15
"""Only what is within this factor of the fastest goes on from the screening to the race."""
HOPELESS = 3.0
"""What takes more than so many times the fastest is not screened on after its first round: of some
100 engines the slow ones take most of the time."""
RACE_LOOKS = (16, 24, 36)


def device_answers() -> bool:
    """Whether CUDA still does what it is asked in this process.

    After a fault such as an illegal access to memory it does not, whoever asks.
    """
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def barred(found: Measured, fault: Exception) -> Measured:
    """An engine that raised: excluded, with what it said.

    Raises:
        UnsupportedError: it took the device along, so that nothing else runs in this process.
    """
    reason = one_line(fault)
    if not device_answers():
        raise UnsupportedError(f"{found.choice} ended all work on the device ({reason})") from None
    return msgspec.structs.replace(found, excluded=reason)


class Arm:
    """Something to time: a built plan, or PyTorch's own way.

    Args:
        found: what is known of it.
        run: enqueues it on the current stream.
        thread: on which it is recorded; None for the caller's.
        keep: whose memory it uses by address.
    """

    def __init__(
        self,
        found: Measured,
        run: Callable[[], Any],
        thread: _Thread | None = None,
        keep: Any = None,
    ) -> None:
        self.found, self.run, self._thread, self._keep = found, run, thread, keep
        self.times_ns: list[float] = []

    def record(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Warms it up and records it on a stream, in memory of this pool."""
        if self._thread is None:
            self._record(stream, pool)
            return
        try:
            self._thread.run(lambda: self._record(stream, pool))
        finally:
            self._thread.close()

    def _record(self, stream: torch.cuda.Stream, pool: Any) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(2):
                self.run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which collects garbage and empties the cache at each use.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.run()
            finally:
                graph.capture_end()
        self.run = graph.replay

    def block_ns(self, flush: Flush | None, lead: Lead) -> float:
        """Median time of a few runs; see `blocks.block_ns`."""
        return block_ns(self.run, flush, lead)

    def summary(self) -> Measured:
        """What is known of it, with its times unless it is excluded."""
        if self.found.excluded is not None:
            return self.found
        low, median, high = np.quantile(self.times_ns, [0.25, 0.5, 0.75])
        return msgspec.structs.replace(
            self.found,
            median_ns=float(median),
            spread=float((high - low) / 2 / median) if len(self.times_ns) > 1 else None,
            runs=len(self.times_ns),
        )


def by_pytorch(given: Operands, error: float) -> list[Arm]:
    """PyTorch's default, and what its benchmark mode would choose.

    PyTorch keeps what it chose per thread: only a fresh one looks anew.
    """

    def benchmarked() -> None:
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, True
        try:
            given.by_pytorch()
        finally:
            cudnn.benchmark = before

    return [
        Arm(Measured(ATEN, error=error), given.by_pytorch, _Thread()),
        Arm(Measured(BENCHMARK, error=error), benchmarked, _Thread()),
    ]


class _Thread:
    """A thread that runs what it is given, one at a time."""

    def __init__(self) -> None:
        self._work: Callable[[], Any] | None = None
        self._error: BaseException | None = None
        self._ready, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._loop, daemon=True).start()

    def run(self, work: Callable[[], Any]) -> None:
        """Runs it and waits for it; raises what it raises."""
        self._work, self._error = work, None
        self._ready.release()
        self._done.acquire()
        # A kept error would keep the frames that it passed, and their tensors.
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Lets the thread end."""
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
    """Records arms and warms them up, before rounds are taken of them.

    Returns:
        Those that can be timed; the others are excluded with the reason.

    Raises:
        UnsupportedError: the device no longer answers.
    """
    recorded: list[Arm] = []
    place: tuple[torch.cuda.Stream, Any] | None = None
    for arm in arms:
        place = place or (torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        try:
            arm.record(*place)
        except Exception as fault:
            arm.found = barred(arm.found, fault)
            # What was being recorded may still hold the stream and the pool.
            place = None
        else:
            recorded.append(arm)
    return recorded


def take_rounds(
    arms: Sequence[Arm],
    flush: Flush | None,
    rng: Random,
    stop: Callable[[], bool],
    incumbent: str | None = None,
) -> None:
    """Screens arms, and races those that are near the fastest.

    PyTorch's own are screened to the end, since they are shown. The incumbent races too, however
    far behind: what takes its place is to be shown by pairs. An arm that raises is excluded with
    the reason, and the others race anew.

    Args:
        arms: get their times, in the order of the rounds.
        flush: before each run; None for a warm cache.
        rng: of the order within a round.
        stop: asked before each round of the race.
        incumbent: the choice made before.

    Raises:
        UnsupportedError: the device no longer answers.
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
    """An arm raised and is excluded."""


def _block_ns(arm: Arm, flush: Flush | None, lead: Lead) -> float:
    try:
        return arm.block_ns(flush, lead)
    except Exception as fault:
        arm.found = barred(arm.found, fault)
        raise _ArmError from fault


def _within(factor: float, arms: Sequence[Arm], kept: Sequence[str | None]) -> list[Arm]:
    """Those within a factor of the fastest, and those of the names that are kept in any case."""
    medians = {arm: float(np.median(arm.times_ns)) for arm in arms if arm.found.excluded is None}
    fastest = min(medians.values(), default=0.0)
    return [
        arm
        for arm, median in medians.items()
        if median <= factor * fastest or arm.found.choice in kept
    ]
