"""One option in a worker process: set up, checked against float64, then timed on demand."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from rival_options import OPTIONS, Call

import steadytorch as steady
from steadytorch.bench.bench_worker import WorkloadHandler, own_errors
from steadytorch.bench.counting import counted_of, counting
from steadytorch.measure.sampler import warm_up
from steadytorch.tune.tuning_worker import load_reference
from steadytorch.verification.verify import verify

SETTLING_NS = 4e6
"""Time dropped at each turn, after the ramp: other processes have evicted the caches."""


class SetUp(msgspec.Struct, frozen=True):
    """Cost of an option's set-up, and its error.

    Attributes:
        setup_s: seconds from the loaded model to its first result, including compilation.
        peak_memory_bytes: peak memory allocated on the device (CUDA) or resident (CPU).
        error: relative L2 error against float64, the worst of three inputs.
        fault: why its results cannot be used, or None.
    """

    setup_s: float
    peak_memory_bytes: int
    error: float | None
    fault: str | None


class RivalHandler(WorkloadHandler):
    """Worker of the benchmark. Methods take and return msgpack types."""

    counts_cycles = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._clocks_mhz: list[float] = []

    def prepare(self, option: str, plan: str | None) -> float:
        """Set up a hand-written option, or steadytorch with `plan`; return the seconds taken."""
        self._is_ours = plan is not None
        device = self.workload.device.type
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with own_errors():
            self.model = self._served(plan) if plan is not None else self._by_hand(device, option)
            self.step = self.workload.with_model(self.model).step_function()
            self.sampler.latencies(self.step, 1)
            self._setup_s = time.perf_counter() - start
            if plan is not None:
                self._check_served()
            warmed = warm_up(self.step, self.sampler)
        self.group, self.iteration_ns = warmed.group, warmed.iteration_ns
        return self._setup_s

    def check(self) -> dict[str, Any]:
        """Read the peak memory, then verify the option; return a `SetUp`."""
        peak = self._peak_memory()
        data = load_reference(self.directory)
        # Who writes an option by hand may take its results in another layout.
        found = verify(self.model, self.workload, data, strides=self._is_ours)
        torch.cuda.empty_cache()  # all options stay on the device
        error = None if found.error is None else found.error.relative_l2
        return msgspec.to_builtins(SetUp(self._setup_s, peak, error, found.fault))

    def block(self, metric: str, count: int) -> list[int]:
        """Time a block after dropping the ramp and `SETTLING_NS` more."""
        settling = math.ceil(SETTLING_NS / max(self.iteration_ns * self.group, 1))
        if metric != "period":
            return super().block(metric, settling + count)[settling:]
        sample_ns = self.iteration_ns * self.group
        with counting(self.sampler, self.workload.device, sample_ns):
            times = super().block(metric, settling + count)[settling:]
            self._clocks_mhz.extend(counted_of(self.sampler, count)[0])
        return times

    def clocks(self) -> list[float]:
        """Clock in MHz over every period of the blocks so far, NaN where not counted."""
        return self._clocks_mhz

    def _by_hand(self, device: str, option: str) -> Call:
        example = (self.workload.inputs, dict(self.workload.kwargs))
        return OPTIONS[device][option](self.workload.model, example)

    def _served(self, plan: str) -> Call:
        """Serve the plan as a user would: `plan.apply`, with look-up and checks at each call."""
        loaded = steady.load_plan(plan)
        self._transforms = len(loaded.candidate)
        self._tuned = loaded.apply(self.workload.model)
        return self._tuned

    def _check_served(self) -> None:
        report = self._tuned.report()
        if self._transforms and not report.hits:
            raise RuntimeError(f"the plan was not served: {report}".replace("\n", "; "))
