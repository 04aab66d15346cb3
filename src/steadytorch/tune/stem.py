"""Chooses the kernel configuration of a fused convolution stem in a worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from steadytorch import transforms
from steadytorch.bench.bench_worker import WorkloadHandler
from steadytorch.conv.blocks import Flush
from steadytorch.conv.timing import NOISE, Arm, Measured, record_all, take_rounds
from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d, program_for
from steadytorch.kernels.stem import CONFIGS
from steadytorch.process.fork_server import ForkServer
from steadytorch.process.worker import Worker
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.transforms.base import applied_in_order
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.tune.stem:StemHandler"
START_S = 120.0
"""Timeout in seconds for starting a worker, loading the workload and tracing it."""

Call = Sequence[Any]


class StemHandler(WorkloadHandler):
    """Worker handler that chooses the kernel configuration of a fused stem.

    Its methods take and return types that msgpack can serialise.
    """

    def choose(self, prefix: list[Any], seconds: float) -> str:
        """Name of the fastest stem configuration with the transforms in `prefix`; see `fastest`."""
        specs = msgspec.convert(prefix, list[TransformSpec])
        end = time.perf_counter() + seconds
        with torch.no_grad():
            return fastest(calls_of(self.workload, specs), lambda: time.perf_counter() > end)


class _Stems(TorchFunctionMode):
    """Records the arguments of `conv_relu_max_pool2d` calls, which run fused stems."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is conv_relu_max_pool2d:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def calls_of(workload: Workload, prefix: Sequence[TransformSpec]) -> list[Call]:
    """Arguments of a workload's fused stem calls, recorded while the workload runs once.

    Args:
        workload: the workload, run once.
        prefix: transforms, including the one that fuses the stem.
    """
    with applied_in_order([transforms.create(spec) for spec in prefix], workload) as applied:
        with _Stems() as stems:
            applied.model(*applied.inputs, **applied.kwargs)
        return stems.calls


def fastest(calls: Sequence[Call], stop: Callable[[], bool]) -> str:
    """Name of the stem configuration with the least total time for the given calls.

    Tries configurations by the number of SMs they occupy, most first, then in the order of
    `CONFIGS`. The first configuration tried wins if its median is within `NOISE` of the least.
    Skips configurations that need more shared memory than an SM has, for which PyTorch's operators
    would run instead.

    Args:
        calls: arguments of `conv_relu_max_pool2d`, the configuration last.
        stop: polled before each configuration is compiled and before each round of the race.

    Returns:
        The name; "" if it is the default for these sizes, or if no configuration fits.
    """
    if not calls or not on_device(calls):
        return ""
    made = {name: [prepared_program(call, name) for call in calls] for name in CONFIGS}
    busy = {name: sum(p.busy_cores for p in found) for name, found in made.items() if all(found)}
    arms: dict[str, Arm] = {}
    for name in sorted(busy, key=busy.__getitem__, reverse=True):
        if arms and stop():
            break
        arms[name] = make_arm(name, calls)
    medians = time_arms(arms, calls, stop) if arms else {}
    least = min(medians.values(), default=0.0) * (1 + NOISE)
    chosen = next((name for name, median in medians.items() if median <= least), "")
    usual = {prepared_program(call, "").config.name for call in calls} if chosen else set()
    return "" if usual == {chosen} else chosen


def time_arms(
    arms: Mapping[str, Arm], calls: Sequence[Call], stop: Callable[[], bool]
) -> dict[str, float]:
    """Median time in ns per stem configuration, excluding configurations that raise."""
    # In production the input has just been copied or converted, so it stays in the cache.
    flush = Flush(calls[0][0].device, calls[0][0])
    take_rounds(record_all(list(arms.values())), flush, Random(0), stop)
    timed = {name: arm for name, arm in arms.items() if arm.found.excluded is None}
    return {name: float(np.median(arm.times_ns)) for name, arm in timed.items()}


def on_device(calls: Sequence[Call]) -> bool:
    """Whether all recorded calls run on a GPU."""
    return all(call[0].is_cuda for call in calls)


def prepared_program(call: Call, name: str) -> Any:
    """Kernel launcher of a call in a configuration; None if PyTorch's operators would run."""
    pairs = [(size, size) if isinstance(size, int) else size for size in call[3:8]]
    return program_for(*_with([*call[:3], *pairs, call[8]], name))


def make_arm(name: str, calls: Sequence[Call]) -> Arm:
    """Compiles a stem configuration and returns a benchmark arm that runs all calls with it."""

    def run() -> None:
        for call in calls:
            conv_relu_max_pool2d(*_with(call[:-1], name))

    run()  # compiles
    return Arm(Measured(name), run)


def _with(call: Call, name: str) -> Any:
    return (*call, name)


def choose_config(
    workload_directory: Path,
    *,
    prefix: Candidate,
    device: str,
    deadline_s: float,
    wait: Callable[[Worker, float], Any] = Worker.receive,
    server: ForkServer | None = None,
) -> str:
    """Chooses the kernel configuration of a workload's fused stems in a worker process.

    Args:
        workload_directory: folder with the workload's payload.
        prefix: transforms, including the one that fuses stems; they set dtype and layout.
        device: a CUDA device.
        deadline_s: seconds for choosing.
        wait: returns the worker's answer, given the worker and a timeout in seconds.
        server: forks the worker; None to start an interpreter.

    Raises:
        WorkerFault: the worker raised, died or timed out.
    """
    worker = Worker(HANDLER, workload_directory, "stem", server=server)
    try:
        worker.send("load", device=device, ambient=transforms.ambient())
        wait(worker, START_S)
        worker.send("choose", prefix=msgspec.to_builtins(prefix), seconds=deadline_s)
        return wait(worker, START_S + deadline_s)
    finally:
        worker.close()
