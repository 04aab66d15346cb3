"""What a worker does for whoever times a workload: rebuild, apply a candidate, warm up, time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch import transforms
from steadytorch.device.recorder import Recorder
from steadytorch.errors import SteadyError, UsageError
from steadytorch.measure.overhead import probe_overhead
from steadytorch.measure.sampler import (
    Sampler,
    Step,
    StepError,
    WarmUp,
    grouped,
    sampler_for,
    warm_up,
)
from steadytorch.measure.statistics import quantile_interval
from steadytorch.measure.warmup import steady_part
from steadytorch.results.candidate import TransformSpec
from steadytorch.results.measure import SetUp
from steadytorch.transforms.base import applied_in_order
from steadytorch.trial.counting import counted_of, counting, noted
from steadytorch.trial.ramp import DISCARD, ramp
from steadytorch.trial.series import Series
from steadytorch.workload import operators, travel
from steadytorch.workload.start import Start, with_optimizer
from steadytorch.workload.workload import Workload

PAYLOAD = "workload.pt"
LOOKS = tuple(int(100 * 1.5**k) for k in range(18))
"""Sample counts at which a series may be found precise enough."""
RESOLVED = 0.005
"""Half-width of the median's interval, over the median, at which a series is precise enough."""
ENOUGH_FOR_P99 = 1200
STOP = "stop"
"""A file of this name in the worker's directory ends a series before its time."""
TAKEN = "{metric}.i64"
"""Samples of a series in ns as they are taken: what is left of them where the process dies."""
CHUNK_NS = 500e6
"""Longest stretch without looking for that file, and without noting the clock."""
FIRST_COUNT = 10
"""Samples in the first stretch at the most: a first idea of how long one takes."""


def save_payload(workload: Workload, directory: Path) -> None:
    """Writes the workload, weights included, for workers to load.

    Raises:
        UsageError: it holds what cannot be pickled.
    """
    try:
        travel.save(workload, directory / PAYLOAD)
    except (OSError, SteadyError):
        raise
    except Exception as error:
        held = "it holds" if workload.feed is None else "it holds, its loader included,"
        raise UsageError(
            f"{workload.name} cannot be sent to a worker process ({_one_line(error)}): make what "
            f"{held} picklable"
        ) from error


class BrokenOff(msgspec.Struct, frozen=True):
    """What a workload did before it failed while warming up.

    Attributes:
        set_up: how far it came.
        series: the calls that ended well, as latencies; nothing was recorded beside them.
    """

    set_up: SetUp
    series: Series


class _Keeping:
    """A sampler that keeps the latencies it takes: a step may fail before its first sample.

    Args:
        sampler: takes them.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.kept: list[int] = []

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self._sampler.periods(step, count)

    def latencies(self, step: Step, count: int) -> np.ndarray:
        found = self._sampler.latencies(step, count)
        self.kept.extend(found.tolist())
        return found

    def clock_difference(self) -> float | None:
        return self._sampler.clock_difference()


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises what the model raised: its type and text decide what becomes of the candidate."""
    try:
        yield
    except StepError as error:
        raise operators.explained(error.__cause__ or error) from None


class WorkloadHandler:
    """Answers whoever times a workload. Methods take and return msgpack types.

    Args:
        directory: holds the payload.
    """

    counts_cycles = False
    """Whether the clock of a GPU is counted beside the periods of a series."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context: AbstractContextManager[Workload] | None = None
        self._workload: Workload
        self._sampler: Sampler
        self._group, self._iteration_ns = 1, 0
        self._broken_off: BrokenOff | None = None
        self._start: Start

    def load(self, device: str, ambient: dict[str, str]) -> None:
        """Makes this process like the caller's and loads the workload onto the device."""
        transforms.set_ambient(ambient)
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
        self._workload = with_optimizer(travel.load(self._directory / PAYLOAD).to(device))
        self._start = Start(self._workload)
        self._sampler = sampler_for(self._workload.device.type)

    @own_errors()
    def set_up(self, candidate: list[Any]) -> dict[str, Any]:
        """Applies the candidate and warms it up; returns a `SetUp`."""
        specs = msgspec.convert(candidate, list[TransformSpec])
        start = time.perf_counter()
        self._context = applied_in_order([transforms.create(s) for s in specs], self._workload)
        applied = self._context.__enter__()
        # Timed through the caller's own inputs: what a transform converts, it converts every call.
        self._model = applied.model
        own = {"inputs": self._workload.inputs, "kwargs": self._workload.kwargs}
        self._step = replace(applied, **own).step_function()
        self._sampler.latencies(self._step, 1)
        setup_s = time.perf_counter() - start
        timer = _Keeping(self._sampler)
        try:
            warmed = warm_up(self._step, timer)
        except StepError as error:
            self._broken_off = self._kept(timer.kept, setup_s, error)
            raise
        self._group, self._iteration_ns = warmed.group, warmed.iteration_ns
        return msgspec.to_builtins(SetUp(setup_s, warmed, self._peak_memory()))

    @own_errors()
    def block(self, metric: str, count: int) -> list[int]:
        """Times a block of `count` iterations in ns each, after a `ramp` that is not kept."""
        # Training begins anew and takes few steps: on one batch for ever, weights overflow or
        # gradients vanish, which a CPU is slow with, and blocks would depend on those before.
        self._start.restore()
        in_training = self._workload.is_training
        before = DISCARD if in_training else ramp(self._iteration_ns * self._group)
        times = self._time(metric, before + count)[0][before:].tolist()
        self._iteration_ns = int(np.median(times))  # warming up is timed beside other set-ups
        return times

    def broken_off(self) -> dict[str, Any] | None:
        """What was timed before warming up failed, as a `BrokenOff`; None if nothing was."""
        return None if self._broken_off is None else msgspec.to_builtins(self._broken_off)

    def _kept(self, latencies: list[int], setup_s: float, error: StepError) -> BrokenOff | None:
        if not latencies:
            return None
        warmed = WarmUp(latencies[0], len(latencies), int(np.median(latencies)), 1)
        series = Series(
            durations_ns=latencies,
            stretches=[],
            host_ns=[],
            overhead_ns=probe_overhead(self._sampler, 200),
            group=1,
            resolved=False,
            recording=None,
            failed=_one_line(error.__cause__),
        )
        return BrokenOff(SetUp(setup_s, warmed, self._peak_memory()), series)

    def series(self, metric: str, seconds: float, whole: bool = False) -> dict[str, Any]:
        """Times iterations until their median is precise or the time is over; returns a `Series`.

        With `whole` until the time is over in any case.

        An exception of the workload ends the series, as a file `STOP` does; what was timed before
        is kept.
        """
        if not whole:  # loaded at the first look, these would disturb the series
            import ruptures  # noqa: F401
            import scipy.special  # noqa: F401

        # What loading left behind is no garbage of the steps: a tenth of a second for all objects.
        gc.collect()
        overhead_ns = probe_overhead(self._sampler, 200) / self._group
        durations: list[int] = []
        host: list[int] = []
        stretches: list[tuple[int, int]] = []
        clocks: list[float] = []
        gaps: list[int] = []
        failed, ended, stopped, spent = None, False, False, 0.0
        counts = metric == "period" and self.counts_cycles
        given = (self._sampler, self._workload.device, self._iteration_ns * self._group)
        with (
            counting(*given) if counts else nullcontext() as why,
            Recorder(str(self._workload.device)) as recorder,
            (self._directory / TAKEN.format(metric=metric)).open("wb", buffering=0) as kept,
        ):
            start = time.perf_counter_ns()
            while failed is None and not (ended or stopped) and (not durations or spent < seconds):
                began, taken, enqueued, failed = self._stretch(metric, durations, seconds - spent)
                stretches.append((began, len(taken)))
                kept.write(taken.astype(np.int64).tobytes())
                durations.extend(taken.tolist())
                host.extend(enqueued.tolist())
                counted, apart = counted_of(self._sampler, len(taken))
                clocks.extend(counted)
                gaps.extend(apart)
                spent = (time.perf_counter_ns() - start) * 1e-9
                ended = not whole and _resolved(durations, spent / seconds)
                stopped = (self._directory / STOP).exists()
        series = Series(
            durations_ns=durations,
            stretches=stretches,
            host_ns=host if metric == "period" else [],
            overhead_ns=overhead_ns,
            group=self._group,
            resolved=ended,
            recording=msgspec.to_builtins(noted(recorder.recording, why)),
            failed=failed,
            stopped=stopped,
            clock_difference=self._sampler.clock_difference(),
            clocks_mhz=clocks if np.isfinite(clocks).any() else None,
            gaps_ns=gaps if any(gaps) else None,
        )
        return msgspec.to_builtins(series)

    def _stretch(
        self, metric: str, durations: list[int], seconds_left: float
    ) -> tuple[int, np.ndarray, np.ndarray, str | None]:
        """The next stretch of a series: its start, times, host times, and what ended it early."""
        # The mean: a few long samples may take most of the time.
        expected_ns = float(np.mean(durations)) if durations else float(self._iteration_ns)
        count = _next_count(len(durations), expected_ns * self._group, seconds_left)
        # A device's queue is empty after each break: filling it is no period.
        before = DISCARD if metric == "period" and self._workload.device.type == "cuda" else 0
        began, failed = time.perf_counter_ns(), None
        try:
            times, host = self._time(metric, before + count)
        except StepError as error:
            times, host = error.durations_ns // self._group, error.host_ns // self._group
            failed = _one_line(error.__cause__)
        began += int(times[:before].sum()) * self._group
        return began, times[before:], host[before:], failed

    def close(self) -> None:
        """Undoes the candidate."""
        if self._context is not None:
            self._context.__exit__(None, None, None)

    def _time(self, metric: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        step = grouped(self._step, self._group)
        if metric == "latency":
            times = self._sampler.latencies(step, count)
            return times // self._group, times
        times, host = self._sampler.periods(step, count)
        return times // self._group, host // self._group

    def _peak_memory(self) -> int:
        if self._workload.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0


def _next_count(taken: int, sample_ns: float, seconds_left: float) -> int:
    """Samples up to the next planned look, and no more than the time left or a stretch allows."""
    target = next((look for look in LOOKS if look > taken), taken + LOOKS[-1])
    affordable = int(min(seconds_left * 1e9, CHUNK_NS) / max(sample_ns, 1.0)) + 1
    return max(1, min(target - taken if taken else FIRST_COUNT, affordable))


def _resolved(durations: list[int], share_spent: float) -> bool:
    """Whether the median is known well enough, and the tail within half of the time.

    Of a series that is not steady no interval may be claimed, however narrow it is.
    """
    if len(durations) not in LOOKS or (len(durations) < ENOUGH_FOR_P99 and share_spent < 0.5):
        return False
    samples = np.asarray(durations, dtype=np.float64)
    # The looks share the error, as in any sequential test.
    interval, _ = quantile_interval(samples, 0.5, 1 - 0.05 / len(LOOKS))
    if interval is None:
        return False
    narrow = (interval[1] - interval[0]) / 2 <= RESOLVED * float(np.median(samples))
    return narrow and steady_part(samples).steady


def _one_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")[:300]
