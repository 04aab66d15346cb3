"""What a worker does to explain a workload beside timing it: profile, pause, measure rates."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch.autograd import profiler

from steadytorch.bench.ramp import DISCARD
from steadytorch.bench.worker import WorkloadHandler, own_errors
from steadytorch.device.recorder import Recorder
from steadytorch.runtime.benchmark_mode import has_convolved

STEP_MARK = "ProfilerStep#"
"""What PyTorch's own schedule calls its steps, so that every reader of traces knows them."""
SETTLING_MARK = "steadytorch.settling"
GC_MARK = "steadytorch.gc"
TRACE_FILE = "steps.trace.json"
FEWEST_STEPS = 3
"""What shares of the variance need."""
TRACE_BYTES = 200_000_000
"""A trace of this size is read in about three seconds; fewer steps are profiled to stay below."""
SWITCHES = ("record_shapes", "profile_memory")
"""What is recorded beside times."""
SETTLING = 1
"""Steps recorded before the first that counts: the profiler's buffers are new to them, and the
device has work from there on."""
_RECOVER = 2
"""Calls between a call after a pause and one that stands for no pause: they bring it to speed."""


class Profiled(msgspec.Struct, frozen=True):
    """Steps run under the profiler.

    Attributes:
        periods_ns: of the steps, by the sampler that timed them without the profiler.
        step_bytes: size of the trace, per step.
        closing_s: seconds to stop the profiler and write the trace.
        recording: telemetry meanwhile, as `device.recording.Recording`.
        compilations: frames torch.compile began to compile meanwhile; None where not in use.
    """

    periods_ns: list[int]
    step_bytes: int
    closing_s: float
    recording: Any
    compilations: int | None


class ExplainHandler(WorkloadHandler):
    """Answers whoever explains a workload. Methods take and return msgpack types."""

    counts_cycles = True
    _switches, _warmed_without = False, False

    def set_up(self, candidate: list[Any]) -> dict[str, Any]:
        """As for everyone who times; notes how cuDNN's benchmark mode stood then."""
        found = super().set_up(candidate)
        self._switches = any(spec["name"] == "cudnn_benchmark" for spec in candidate)
        self._warmed_without = not torch.backends.cudnn.benchmark and has_convolved()
        return found

    @own_errors()
    def profile(self, steps: int, seconds: float) -> dict[str, Any]:
        """Profiles steps into the file `TRACE_FILE`; returns a `Profiled`.

        One step is profiled beforehand: it starts the profiler up, and shows how many there is
        time for.

        Args:
            steps: how many at the most.
            seconds: for running and writing them. Three steps are profiled even if they take
                longer, one if more of them would be a trace of more than `TRACE_BYTES`.
        """
        first = self._profiled(1)
        step_s = 1e-9 * max(first.periods_ns) + first.closing_s
        in_time = max(FEWEST_STEPS, int(seconds / step_s))
        in_space = max(1, TRACE_BYTES // first.step_bytes)
        return msgspec.to_builtins(self._profiled(min(steps, in_time, in_space)))

    @own_errors()
    def pauses(self, pause_ms: list[float], rounds: int, seconds: float) -> dict[str, Any]:
        """Latencies of calls after pauses, and of calls after calls, in turns.

        Args:
            pause_ms: lengths of the pauses.
            rounds: calls after each of them, at the most.
            seconds: after which no further round begins.

        Returns:
            `pause_ms`; `after_ns`, the median latency after each; `steady_ns`, that without a
            pause; `rounds`, how many calls each is of; `after_samples_ns`, `steady_samples_ns`.
        """
        after: list[list[int]] = [[] for _ in pause_ms]
        steady: list[int] = []
        until = time.monotonic() + seconds
        while len(steady) < rounds and time.monotonic() < until:
            for taken, pause in zip(after, pause_ms, strict=True):
                time.sleep(1e-3 * pause)
                taken.append(self._latency())
            self._sampler.latencies(self._step, _RECOVER)
            steady.append(self._latency())
        return {
            "pause_ms": pause_ms,
            "after_ns": [int(np.median(taken)) for taken in after],
            "steady_ns": int(np.median(steady)),
            "rounds": len(steady),
            "after_samples_ns": after,
            "steady_samples_ns": steady,
        }

    def rates(self, device: str, dtypes: list[str]) -> Any:
        """What the device reaches, as `explain.rates.Rates`."""
        from steadytorch.rates.device_rates import measure_rates

        return msgspec.to_builtins(measure_rates(device, dtypes))

    def notes(self) -> dict[str, Any]:
        """What else this process knows; see `capture` for the names."""
        benchmark = bool(torch.backends.cudnn.benchmark)
        found: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "cudnn_benchmark": benchmark or self._switches,
            "cudnn_benchmark_late": benchmark and self._warmed_without,
            "clock_offset_ns": clock_offset_ns(),
        }
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]:
            found["graph_breaks"] = dict(dynamo.counters["graph_break"])
        return found

    def _latency(self) -> int:
        return int(self._sampler.latencies(self._step, 1)[0])

    def _profiled(self, count: int) -> Profiled:
        profile = profile_of(self._workload.device.type)
        profile._prepare_trace()
        # The profiler's own start-up falls into these, which it does not record.
        self._sampler.periods(self._step, DISCARD)
        with Recorder(str(self._workload.device)) as recorder, _collections_marked():
            profile._start_trace()
            for switch in SWITCHES:
                torch.autograd._add_metadata_json(switch, "1")
            try:
                periods, _ = self._sampler.periods(_marked(self._step), SETTLING + count)
            finally:
                stopping = time.monotonic()
                profile.__exit__(None, None, None)
        path = self._directory / TRACE_FILE
        profile.export_chrome_trace(str(path))
        compiled = recorder.recording.compilations
        return Profiled(
            periods_ns=periods[SETTLING:].tolist(),
            step_bytes=path.stat().st_size // (SETTLING + count),
            closing_s=(time.monotonic() - stopping) / (SETTLING + count),
            recording=msgspec.to_builtins(recorder.recording),
            compilations=compiled[-1] if compiled else None,
        )


def profile_of(device: str) -> profiler.profile:
    """A profile of the host, and of a GPU, as `torch.profiler.profile` makes it.

    That one imports the whole compiler, for seconds, to ask it for one setting.

    Args:
        device: the type, `cpu` or `cuda`.
    """
    switches = dict.fromkeys(SWITCHES, True)
    return profiler.profile(
        use_device=None if device == "cpu" else device, use_kineto=True, **switches
    )


def _marked(step: Callable[[], Any]) -> Callable[[], None]:
    """The step, its calls marked in the trace; those that warm up and settle are counted along."""
    numbers = itertools.count(DISCARD)

    def marked() -> None:
        number = next(numbers)
        settled = number >= DISCARD + SETTLING
        with profiler.record_function(f"{STEP_MARK}{number}" if settled else SETTLING_MARK):
            step()

    return marked


@contextmanager
def _collections_marked() -> Iterator[None]:
    """Marks runs of Python's garbage collector in the trace."""
    running: list[profiler.record_function] = []

    def hear(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            running.append(profiler.record_function(GC_MARK))
            running[-1].__enter__()
        elif running:
            running.pop().__exit__(None, None, None)

    gc.callbacks.append(hear)
    try:
        yield
    finally:
        gc.callbacks.remove(hear)


def clock_offset_ns() -> int:
    """Unix time less `time.perf_counter_ns`, in ns: the pair of readings that lay closest."""
    found = []
    for _ in range(10):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        found.append((after - before, unix - (before + after) // 2))
    return min(found)[1]
