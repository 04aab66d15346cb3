"""What a tuning worker does, in its own process: rebuild, apply, verify, then time on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch import transforms
from steadytorch.device.roofline import matrix_rate
from steadytorch.measure.sampler import Sampler, StepError, WarmUp, grouped, sampler_for, warm_up
from steadytorch.transforms.base import TransformSpec, applied_in_order
from steadytorch.tune.verify import make_reference, verify
from steadytorch.workload import travel
from steadytorch.workload.workload import Workload

PAYLOAD = "workload.pt"
REFERENCE = "reference.pt"
DISCARD = 2
"""Iterations thrown away after each switch between workers: they ramp up, they are not samples."""


def save_payload(workload: Workload, directory: Path) -> None:
    """Writes the workload, weights included, for workers to load."""
    travel.save(workload, directory / PAYLOAD)


class SetUp(msgspec.Struct, frozen=True):
    """How a candidate came to be ready.

    Attributes:
        setup_s: seconds to apply it and make the first call, compilation included; starting the
            process and loading the model are not part of it.
        warm_up: how it was brought to speed.
        peak_memory_bytes: device memory allocated at the most (CUDA), or resident host memory at
            the most (CPU), up to the end of the warm-up.
    """

    setup_s: float
    warm_up: WarmUp
    peak_memory_bytes: int


class Character(msgspec.Struct, frozen=True):
    """What bounds the untouched workload.

    Attributes:
        regime: launch-, compute- or memory-bound.
        host_share: median enqueue time over median period.
        matrix_share: achieved operations per second over the device's measured matrix rate.
    """

    regime: str
    host_share: float
    matrix_share: float


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises what the model raised: its type and text decide what becomes of the candidate."""
    try:
        yield
    except StepError as error:
        raise error.__cause__ or error from None


class TuningHandler:
    """Answers a tuning parent. Methods take and return msgpack types.

    Args:
        directory: holds the payload, and the reference once there is one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context: AbstractContextManager[Workload] | None = None
        self._workload: Workload
        self._sampler: Sampler
        self._group = 1

    def load(self, device: str, ambient: dict[str, str]) -> None:
        """Makes this process like the caller's and loads the workload onto the device."""
        transforms.set_ambient(ambient)
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
        loaded = travel.load(self._directory / PAYLOAD)
        self._workload = loaded.to(device)
        self._sampler = sampler_for(self._workload.device.type)

    @_own_errors()
    def set_up(self, candidate: list[Any]) -> dict[str, Any]:
        """Applies the candidate and warms it up; returns a `SetUp`."""
        specs = msgspec.convert(candidate, list[TransformSpec])
        start = time.perf_counter()
        self._context = applied_in_order([transforms.create(s) for s in specs], self._workload)
        applied = self._context.__enter__()
        # Timed through the caller's own inputs: what a transform converts, it converts every call.
        self._model = applied.model
        inputs, kwargs = self._workload.inputs, dict(self._workload.kwargs)
        model = self._model
        self._step = lambda: model(*inputs, **kwargs)
        self._sampler.latencies(self._step, 1)
        setup_s = time.perf_counter() - start
        warmed = warm_up(self._step, self._sampler)
        self._group = warmed.group
        return msgspec.to_builtins(SetUp(setup_s, warmed, self._peak_memory()))

    def reference(self, seed: int) -> dict[str, Any]:
        """Writes the reference for every verification and returns a `Reference`."""
        data, summary = make_reference(self._workload, seed)
        torch.save(data, self._directory / REFERENCE)
        return msgspec.to_builtins(summary)

    def verify(self) -> dict[str, Any]:
        """Compares the applied candidate with the reference and returns a `Verification`."""
        data = torch.load(
            self._directory / REFERENCE,
            map_location=self._workload.device,
            weights_only=True,
        )
        return msgspec.to_builtins(verify(self._model, self._workload, data))

    @_own_errors()
    def block(self, metric: str, count: int) -> list[int]:
        """Times a block of `count` iterations in ns each, after `DISCARD` that are not kept."""
        step = grouped(self._step, self._group)
        if metric == "latency":
            times = self._sampler.latencies(step, count + DISCARD)
        else:
            times, _ = self._sampler.periods(step, count + DISCARD)
        return (np.asarray(times[DISCARD:]) // self._group).tolist()

    @_own_errors()
    def characterise(self) -> dict[str, Any]:
        """Says what bounds the workload as it runs now; returns a `Character`."""
        periods, host = self._sampler.periods(self._step, 12)
        period_s = float(np.median(periods)) * 1e-9
        device = str(self._workload.device)
        on_host = self._workload.device.type == "cpu"
        host_share = (
            0.0 if on_host else float(np.median(host)) / max(float(np.median(periods)), 1.0)
        )
        rate = matrix_rate(device, self._workload.dtype)
        matrix_share = self._operations() / period_s / rate
        # Floor of the memory-bound side of the roofline: enough arithmetic per byte that the matrix
        # units, not the memory, set the pace.
        regime = "compute-bound" if matrix_share >= 0.3 else "memory-bound"
        if host_share >= 0.8:
            regime = "launch-bound"
        return msgspec.to_builtins(Character(regime, host_share, matrix_share))

    def close(self) -> None:
        """Undoes the candidate."""
        if self._context is not None:
            self._context.__exit__(None, None, None)

    def _operations(self) -> float:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self._step()
        return float(counter.get_total_flops())

    def _peak_memory(self) -> int:
        if self._workload.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0
