"""How a fused stem is cut up, chosen in a worker process for the leader of a search."""

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
from steadytorch.bench.worker import WorkloadHandler
from steadytorch.conv.blocks import Flush
from steadytorch.conv.timing import NOISE, Arm, Measured, record_all, take_rounds
from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d, program_for
from steadytorch.kernels.stem import CONFIGS
from steadytorch.process.worker import Worker
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.transforms.base import applied_in_order
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.tune.stem:StemHandler"
START_S = 120.0
"""For starting a worker, loading the workload and tracing it."""

Call = Sequence[Any]


class StemHandler(WorkloadHandler):
    """Answers whoever chooses a configuration. Methods take and return msgpack types."""

    def choose(self, prefix: list[Any], seconds: float) -> str:
        """The name of the fastest for the stems as they are after `prefix`, see `fastest`."""
        specs = msgspec.convert(prefix, list[TransformSpec])
        end = time.perf_counter() + seconds
        with torch.no_grad():
            return fastest(calls_of(self._workload, specs), lambda: time.perf_counter() > end)


class _Stems(TorchFunctionMode):
    """Keeps what fused stems are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is conv_relu_max_pool2d:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def calls_of(workload: Workload, prefix: Sequence[TransformSpec]) -> list[Call]:
    """What the fused stems of a workload are called with, seen at one call of it.

    Args:
        workload: to be run once.
        prefix: transforms, the one that fuses among them.
    """
    with applied_in_order([transforms.create(spec) for spec in prefix], workload) as applied:
        with _Stems() as stems:
            applied.model(*applied.inputs, **applied.kwargs)
        return stems.calls


def fastest(calls: Sequence[Call], stop: Callable[[], bool]) -> str:
    """The configuration with which these calls together take the least time on their device.

    Those that leave fewer cores idle are tried first, among equals those that stand first in
    `CONFIGS`; ties go to the one tried first. Those that need more memory on the chip than
    there is, so that PyTorch's own operators would run, are left out.

    Args:
        calls: arguments of `conv_relu_max_pool2d`, the configuration last.
        stop: asked before each configuration is compiled, and before each round of the race.

    Returns:
        Its name; "" where it is what follows from the sizes in any case, or where there is none.
    """
    if not calls or not _on_device(calls):
        return ""
    made = {name: [_program(call, name) for call in calls] for name in CONFIGS}
    busy = {name: sum(p.busy_cores for p in found) for name, found in made.items() if all(found)}
    arms: dict[str, Arm] = {}
    for name in sorted(busy, key=busy.__getitem__, reverse=True):
        if arms and stop():
            break
        arms[name] = _arm(name, calls)
    medians = _timed(arms, calls, stop) if arms else {}
    least = min(medians.values(), default=0.0) * (1 + NOISE)
    chosen = next((name for name, median in medians.items() if median <= least), "")
    usual = {_program(call, "").config.name for call in calls} if chosen else set()
    return "" if usual == {chosen} else chosen


def _timed(
    arms: Mapping[str, Arm], calls: Sequence[Call], stop: Callable[[], bool]
) -> dict[str, float]:
    """The median time in ns of each that does not raise."""
    # The input has just come from the host, or from a conversion.
    flush = Flush(calls[0][0].device, calls[0][0])
    take_rounds(record_all(list(arms.values())), flush, Random(0), stop)
    timed = {name: arm for name, arm in arms.items() if arm.found.excluded is None}
    return {name: float(np.median(arm.times_ns)) for name, arm in timed.items()}


def _on_device(calls: Sequence[Call]) -> bool:
    return all(call[0].is_cuda for call in calls)


def _program(call: Call, name: str) -> Any:
    pairs = [(size, size) if isinstance(size, int) else size for size in call[3:8]]
    return program_for(*_with([*call[:3], *pairs, call[8]], name))


def _arm(name: str, calls: Sequence[Call]) -> Arm:
    def run() -> None:
        for call in calls:
            conv_relu_max_pool2d(*_with(call[:-1], name))

    run()  # compiles it, in the time there is
    return Arm(Measured(name), run)


def _with(call: Call, name: str) -> Any:
    return (*call, name)


def choose_config(
    workload_directory: Path, *, prefix: Candidate, device: str, deadline_s: float
) -> str:
    """Chooses a configuration for the stems of a workload, in a worker process.

    Args:
        workload_directory: with the workload's payload in it.
        prefix: transforms, the one that fuses stems among them: element type and layout decide.
        device: a CUDA device.
        deadline_s: seconds of choosing.

    Raises:
        WorkerFault: the worker raised, died or took too long.
    """
    worker = Worker(HANDLER, workload_directory, "stem")
    try:
        worker.call("load", START_S, device=device, ambient=transforms.ambient())
        given = msgspec.to_builtins(prefix)
        return worker.call("choose", START_S + deadline_s, prefix=given, seconds=deadline_s)
    finally:
        worker.close()
