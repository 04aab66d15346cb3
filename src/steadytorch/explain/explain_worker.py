"""Worker that explains a workload: profiles steps, times calls after pauses, measures rates."""

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

from steadytorch.bench.bench_worker import WorkloadHandler, own_errors
from steadytorch.bench.ramp import DISCARD
from steadytorch.device.recorder import Recorder
from steadytorch.runtime.benchmark_mode import has_convolved

STEP_MARK = "ProfilerStep#"
"""Step name of PyTorch's own schedule, which every trace reader knows."""
SETTLING_MARK = "steadytorch.settling"
GC_MARK = "steadytorch.gc"
TRACE_FILE = "steps.trace.json"
FEWEST_STEPS = 3
"""Minimum steps for shares of the variance."""
TRACE_BYTES = 200_000_000
"""Maximum trace size, read in about three seconds; fewer steps are profiled to stay below it."""
SWITCHES = ("record_shapes", "profile_memory")
"""Records of the profiler besides times."""
SETTLING = 1
"""Recorded steps before the first that counts: they fill the profiler's new buffers and give the
device work."""
_RECOVER = 2
"""Calls between one after a pause and one without a pause, to restore full speed."""


class Profiled(msgspec.Struct, frozen=True):
    """Results of the steps that ran under the profiler.

    Attributes:
        periods_ns: periods of the steps, by the sampler of the unprofiled run.
        step_bytes: trace size per step.
        closing_s: seconds per step to stop the profiler and write the trace.
        recording: telemetry of these steps, as `device.recording.Recording`.
        compilations: frames whose compilation by torch.compile began; None if not in use.
    """

    periods_ns: list[int]
    step_bytes: int
    closing_s: float
    recording: Any
    compilations: int | None


class ExplainHandler(WorkloadHandler):
    """Handler for explanations. Methods take and return msgpack types."""

    counts_cycles = True
    _switches, _warmed_without = False, False

    def set_up(self, candidate: list[Any]) -> dict[str, Any]:
        """Set up the workload as for timing, and note the state of cuDNN's benchmark mode."""
        found = super().set_up(candidate)
        self._switches = any(spec["name"] == "cudnn_benchmark" for spec in candidate)
        self._warmed_without = not torch.backends.cudnn.benchmark and has_convolved()
        return found

    @own_errors()
    def profile(self, steps: int, seconds: float) -> dict[str, Any]:
        """Profile steps into the file `TRACE_FILE`; return a `Profiled`.

        One step is profiled first, to warm up the profiler and to estimate how many steps fit in
        `seconds`. If one step suffices, that is it.

        Args:
            steps: maximum number of steps.
            seconds: time to run and write them. Three steps are profiled even if they take longer;
                one, if more would exceed a trace of `TRACE_BYTES`.
        """
        first = self._profiled(1)
        if steps == 1:
            return msgspec.to_builtins(first)
        step_s = 1e-9 * max(first.periods_ns) + first.closing_s
        in_time = max(FEWEST_STEPS, int(seconds / step_s))
        in_space = max(1, TRACE_BYTES // first.step_bytes)
        return msgspec.to_builtins(self._profiled(min(steps, in_time, in_space)))

    @own_errors()
    def pauses(self, pause_ms: list[float], rounds: int, seconds: float) -> dict[str, Any]:
        """Time calls after a pause and calls without a pause, alternately.

        Args:
            pause_ms: lengths of the pauses.
            rounds: maximum number of calls after each pause.
            seconds: time after which no further round begins.

        Returns:
            `pause_ms`; `after_ns`, the median latency after each pause; `steady_ns`, the median
            without a pause; `rounds`, the number of calls of each kind; `after_samples_ns`,
            `steady_samples_ns`.
        """
        after: list[list[int]] = [[] for _ in pause_ms]
        steady: list[int] = []
        until = time.monotonic() + seconds
        while len(steady) < rounds and time.monotonic() < until:
            for taken, pause in zip(after, pause_ms, strict=True):
                time.sleep(1e-3 * pause)
                taken.append(self._latency())
            self.sampler.latencies(self.step, _RECOVER)
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
        """Measured limits of the device, as `rates.device_rates.Rates`."""
        from steadytorch.rates.device_rates import measure_rates

        return msgspec.to_builtins(measure_rates(device, dtypes))

    def notes(self) -> dict[str, Any]:
        """Other observations of this process, by the names listed in `Capture.notes`."""
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
        return int(self.sampler.latencies(self.step, 1)[0])

    def _profiled(self, count: int) -> Profiled:
        profile = profile_of(self.workload.device.type)
        profile._prepare_trace()
        # The profiler's start-up falls into these steps, which it does not record.
        self.sampler.periods(self.step, DISCARD)
        with Recorder(str(self.workload.device)) as recorder, _collections_marked():
            profile._start_trace()
            for switch in SWITCHES:
                torch.autograd._add_metadata_json(switch, "1")
            try:
                periods, _ = self.sampler.periods(_marked(self.step), SETTLING + count)
            finally:
                stopping = time.monotonic()
                profile.__exit__(None, None, None)
        path = self.directory / TRACE_FILE
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
    """Create a profiler of the host, and of the GPU if used, like `torch.profiler.profile`.

    Avoids `torch.profiler.profile`, which takes seconds to import the compiler to read one setting.

    Args:
        device: device type, `cpu` or `cuda`.
    """
    switches = dict.fromkeys(SWITCHES, True)
    return profiler.profile(
        use_device=None if device == "cpu" else device, use_kineto=True, **switches
    )


def _marked(step: Callable[[], Any]) -> Callable[[], None]:
    """Wrap a step so that the trace marks and numbers its calls, warm-up calls included."""
    numbers = itertools.count(DISCARD)

    def marked() -> None:
        number = next(numbers)
        settled = number >= DISCARD + SETTLING
        with profiler.record_function(f"{STEP_MARK}{number}" if settled else SETTLING_MARK):
            step()

    return marked


@contextmanager
def _collections_marked() -> Iterator[None]:
    """Mark runs of Python's garbage collector in the trace."""
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
    """Unix time minus `time.perf_counter_ns`, in ns, from the closest pair of readings."""
    found = []
    for _ in range(10):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        found.append((after - before, unix - (before + after) // 2))
    return min(found)[1]
