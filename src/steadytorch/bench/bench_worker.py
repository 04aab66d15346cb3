"""Worker handler that loads a workload, applies a candidate, warms up and times it."""

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
from steadytorch.bench.counting import counted_of, counting, noted
from steadytorch.bench.ramp import DISCARD, ramp
from steadytorch.bench.series import Series
from steadytorch.compiled import artefact, compiler_choices
from steadytorch.device.recorder import Recorder
from steadytorch.errors import SteadyError, UsageError, one_line
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
from steadytorch.transforms.precision import precision_of
from steadytorch.workload import operators, serialization
from steadytorch.workload.start import Start, with_optimizer
from steadytorch.workload.workload import Workload

PAYLOAD = "workload.pt"
LOOKS = tuple(int(100 * 1.5**k) for k in range(18))
"""Sample counts at which a series may stop for precision."""
RESOLVED = 0.005
"""Relative half-width of the median's interval at which a series is precise enough."""
ENOUGH_FOR_P99 = 1200
STOP = "stop"
"""A file of this name in the worker's directory stops a series early."""
TAKEN = "{metric}.i64"
"""File of a series' samples in ns, written as they are taken, so that they survive a crash."""
CHUNK_NS = 500e6
"""Longest stretch between two checks for the stop file and readings of the clock."""
FIRST_COUNT = 10
"""Maximum number of samples in the first stretch, which estimates the iteration time."""


def save_payload(workload: Workload, directory: Path) -> None:
    """Writes the workload with its weights to a file for workers to load.

    Raises:
        UsageError: the workload cannot be pickled.
    """
    if isinstance(workload.model, torch.jit.ScriptModule):
        raise UsageError(
            f"{workload.name} is a TorchScript module, which cannot be sent to a worker process: "
            "pass the module that it was made from"
        )
    try:
        serialization.save(workload, directory / PAYLOAD)
    except (OSError, SteadyError):
        raise
    except Exception as error:
        held = "contents" if workload.feed is None else "contents, including the loader,"
        raise UsageError(
            f"{workload.name} cannot be sent to a worker process ({one_line(error)}): make its "
            f"{held} picklable"
        ) from error


class BrokenOff(msgspec.Struct, frozen=True):
    """Timings of the calls that succeeded before a workload failed during warm-up.

    Attributes:
        set_up: the partial set-up.
        series: latencies of the successful calls, without a recording.
    """

    set_up: SetUp
    series: Series


class _Keeping:
    """A sampler that records its latencies, so that they survive a failure during warm-up.

    Args:
        sampler: the sampler to wrap.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.kept: list[int] = []

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.sampler.periods(step, count)

    def latencies(self, step: Step, count: int) -> np.ndarray:
        found = self.sampler.latencies(step, count)
        self.kept.extend(found.tolist())
        return found

    def clock_difference(self) -> float | None:
        return self.sampler.clock_difference()


@contextmanager
def own_errors() -> Iterator[None]:
    """Re-raises a `StepError` as the exception that the model itself raised."""
    try:
        yield
    except StepError as error:
        raise operators.explained(error.__cause__ or error) from None


class WorkloadHandler:
    """Worker handler that times a workload.

    Its methods take and return types that msgpack can encode.

    Args:
        directory: folder with the payload.

    Attributes:
        directory: as given.
        workload: the workload, once loaded.
        sampler: times steps on the workload's device.
        model: the model with the candidate applied, once set up.
        step: one iteration with the candidate applied.
        group: number of steps that are timed together.
        iteration_ns: duration of a step, in ns.
    """

    counts_cycles = False
    """Whether to count GPU clock cycles while periods are timed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._context: AbstractContextManager[Workload] | None = None
        self.workload: Workload
        self.sampler: Sampler
        self.group, self.iteration_ns = 1, 0
        self._broken_off: BrokenOff | None = None
        self._start: Start
        self._choices = compiler_choices.NONE

    def load(self, device: str, ambient: dict[str, str]) -> None:
        """Applies the caller's process-wide settings and loads the workload onto the device."""
        transforms.set_ambient(ambient)
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
        self.workload = with_optimizer(serialization.load(self.directory / PAYLOAD).to(device))
        self._start = Start(self.workload)
        self.sampler = sampler_for(self.workload.device.type)

    @own_errors()
    def set_up(self, candidate: list[Any]) -> dict[str, Any]:
        """Applies the candidate's transforms to the workload and warms it up; returns a `SetUp`."""
        specs = msgspec.convert(candidate, list[TransformSpec])
        self._precision = precision_of(tuple(specs))
        start = time.perf_counter()
        self._context = applied_in_order([transforms.create(s) for s in specs], self.workload)
        self._choices = compiler_choices.within(self.directory)
        shared = artefact.supplied(artefact.within(self.directory))
        with shared, compiler_choices.supplied(self._choices):
            applied = self._context.__enter__()
        # Time with the caller's inputs, so that conversions by transforms are timed too.
        self.model, self.applied = applied.model, applied
        own = {"inputs": self.workload.inputs, "kwargs": self.workload.kwargs}
        self.step = replace(applied, **own).step_function()
        self.sampler.latencies(self.step, 1)
        setup_s = time.perf_counter() - start
        timer = _Keeping(self.sampler)
        try:
            warmed = warm_up(self.step, timer)
        except StepError as error:
            self._broken_off = self._kept(timer.kept, setup_s, error)
            raise
        self.group, self.iteration_ns = warmed.group, warmed.iteration_ns
        return msgspec.to_builtins(SetUp(setup_s, warmed, self._peak_memory()))

    @own_errors()
    def block(self, metric: str, count: int) -> list[int]:
        """Discards ramp-up iterations (see `ramp`), then times `count` iterations, each in ns."""
        # Restart training in each block. Endless steps on one batch make weights overflow or
        # gradients vanish, which slows a CPU down, and blocks would depend on earlier ones.
        self._start.restore()
        before = ramp(self.iteration_ns * self.group)
        if self.workload.is_training:
            before = min(before, DISCARD)
        times = self._time(metric, before + count)[0][before:].tolist()
        self.iteration_ns = int(np.median(times))  # warm-up times may include other set-ups
        return times

    def compiler_choices(self) -> dict[str, Any]:
        """Returns the choices that PyTorch's compiler made by timing for the applied candidate."""
        return msgspec.to_builtins(self._choices.of_process())

    def broken_off(self) -> dict[str, Any] | None:
        """Returns samples from before the warm-up failed, as a `BrokenOff`; None without any."""
        return None if self._broken_off is None else msgspec.to_builtins(self._broken_off)

    def _kept(self, latencies: list[int], setup_s: float, error: StepError) -> BrokenOff | None:
        if not latencies:
            return None
        warmed = WarmUp(latencies[0], len(latencies), int(np.median(latencies)), 1)
        series = Series(
            durations_ns=latencies,
            stretches=[],
            host_ns=[],
            overhead_ns=probe_overhead(self.sampler, 200),
            group=1,
            resolved=False,
            recording=None,
            failed=one_line(error.__cause__ or error),
        )
        return BrokenOff(SetUp(setup_s, warmed, self._peak_memory()), series)

    def series(self, metric: str, seconds: float, whole: bool = False) -> dict[str, Any]:
        """Times iterations until their median is precise or the time is up; returns a `Series`.

        An exception of the workload or a `STOP` file ends the series; earlier samples are kept.

        Args:
            metric: `latency` or `period`.
            seconds: sampling time.
            whole: whether to use all of the time even if the median is precise.
        """
        if not whole:  # importing these at the first look would disturb the series
            import ruptures  # noqa: F401
            import scipy.special  # noqa: F401

        # Collect the garbage of loading first: 0.1 s that would otherwise fall into a step.
        gc.collect()
        overhead_ns = probe_overhead(self.sampler, 200) / self.group
        durations: list[int] = []
        host: list[int] = []
        stretches: list[tuple[int, int]] = []
        clocks: list[float] = []
        gaps: list[int] = []
        failed, ended, stopped, spent = None, False, False, 0.0
        counts = metric == "period" and self.counts_cycles
        given = (self.sampler, self.workload.device, self.iteration_ns * self.group)
        with (
            counting(*given) if counts else nullcontext() as why,
            Recorder(str(self.workload.device)) as recorder,
            (self.directory / TAKEN.format(metric=metric)).open("wb", buffering=0) as kept,
        ):
            start = time.perf_counter_ns()
            while failed is None and not (ended or stopped) and (not durations or spent < seconds):
                began, taken, enqueued, failed = self._stretch(metric, durations, seconds - spent)
                stretches.append((began, len(taken)))
                kept.write(taken.astype(np.int64).tobytes())
                durations.extend(taken.tolist())
                host.extend(enqueued.tolist())
                counted, apart = counted_of(self.sampler, len(taken))
                clocks.extend(counted)
                gaps.extend(apart)
                spent = (time.perf_counter_ns() - start) * 1e-9
                ended = not whole and is_resolved(durations, spent / seconds)
                stopped = (self.directory / STOP).exists()
        series = Series(
            durations_ns=durations,
            stretches=stretches,
            host_ns=host if metric == "period" else [],
            overhead_ns=overhead_ns,
            group=self.group,
            resolved=ended,
            recording=msgspec.to_builtins(noted(recorder.recording, why)),
            failed=failed,
            stopped=stopped,
            clock_difference=self.sampler.clock_difference(),
            clocks_mhz=clocks if np.isfinite(clocks).any() else None,
            gaps_ns=gaps if any(gaps) else None,
        )
        return msgspec.to_builtins(series)

    def _stretch(
        self, metric: str, durations: list[int], seconds_left: float
    ) -> tuple[int, np.ndarray, np.ndarray, str | None]:
        """Times the next iterations; returns start, times, host times, and the error or None."""
        # Mean, not median: a few long samples may take most of the time.
        expected_ns = float(np.mean(durations)) if durations else float(self.iteration_ns)
        count = next_count(len(durations), expected_ns * self.group, seconds_left)
        # The device's queue is empty after each break; discard the periods that fill it.
        before = DISCARD if metric == "period" and self.workload.device.type == "cuda" else 0
        began, failed = time.perf_counter_ns(), None
        try:
            times, host = self._time(metric, before + count)
        except StepError as error:
            times, host = error.durations_ns // self.group, error.host_ns // self.group
            failed = one_line(error.__cause__ or error)
        began += int(times[:before].sum()) * self.group
        return began, times[before:], host[before:], failed

    def close(self) -> None:
        """Undoes the candidate."""
        if self._context is not None:
            self._context.__exit__(None, None, None)

    def _time(self, metric: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        step = grouped(self.step, self.group)
        if metric == "latency":
            times = self.sampler.latencies(step, count)
            return times // self.group, times
        times, host = self.sampler.periods(step, count)
        return times // self.group, host // self.group

    def _peak_memory(self) -> int:
        if self.workload.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0


def next_count(taken: int, sample_ns: float, seconds_left: float) -> int:
    """Number of samples to take next: up to the next in `LOOKS`, `CHUNK_NS` or the time left."""
    target = next((look for look in LOOKS if look > taken), taken + LOOKS[-1])
    affordable = int(min(seconds_left * 1e9, CHUNK_NS) / max(sample_ns, 1.0)) + 1
    return max(1, min(target - taken if taken else FIRST_COUNT, affordable))


def is_resolved(durations: list[int], share_spent: float) -> bool:
    """Whether a series may end: it is steady and its median is precise.

    With fewer than `ENOUGH_FOR_P99` samples, half of the sampling time must also have passed.
    """
    if len(durations) not in LOOKS or (len(durations) < ENOUGH_FOR_P99 and share_spent < 0.5):
        return False
    samples = np.asarray(durations, dtype=np.float64)
    # The looks share the error probability, as in any sequential test.
    interval, _ = quantile_interval(samples, 0.5, 1 - 0.05 / len(LOOKS))
    if interval is None:
        return False
    narrow = (interval[1] - interval[0]) / 2 <= RESOLVED * float(np.median(samples))
    return narrow and steady_part(samples).steady
