"""Engines for a workload's convolutions, chosen in a worker process before candidates are timed."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from steadytorch import transforms
from steadytorch.conv.choices import Choice, read_choice, read_choices, write_choices
from steadytorch.conv.choose import Options, Outcome, choose, is_cold
from steadytorch.conv.engines import Filters
from steadytorch.conv.module import engine_convolutions
from steadytorch.conv.plans import DTYPES
from steadytorch.conv.problem import ConvProblem
from steadytorch.device.roofline import copy_bandwidth, matrix_rate
from steadytorch.process.worker import Worker
from steadytorch.transforms.base import Candidate, TransformSpec, applied_in_order
from steadytorch.transforms.cudnn_engines import rewritten_model
from steadytorch.trial.worker import WorkloadHandler, save_payload
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.tune.conv:ConvHandler"
START_S = 120.0
"""For starting a worker, loading the workload and tracing it."""


class Layer(msgspec.Struct, frozen=True):
    """A distinct convolution of a workload.

    Attributes:
        names: where it stands in the model.
        outcome: what was found for it; None where time ran out before.
        operations: multiplications and additions of one.
        traffic_bytes: bytes it moves if each element moves once.
    """

    names: tuple[str, ...]
    problem: str
    outcome: Outcome | None
    operations: int
    traffic_bytes: int


class ConvReport(msgspec.Struct, frozen=True):
    """Every distinct convolution of a workload, and what was chosen.

    Attributes:
        layers: in the order of the network.
        choices: the parameter of the transform `cudnn_engines`.
        cold: whether the L2 cache was flushed before each run.
        operations_per_s: of a matrix product here, in the type of the first convolution.
        bytes_per_s: that memory moves here.
        cudnn: its version, as it counts itself.
        seconds: of choosing.
    """

    layers: tuple[Layer, ...]
    choices: str
    cold: bool
    operations_per_s: float
    bytes_per_s: float
    cudnn: int
    seconds: float


class ConvHandler(WorkloadHandler):
    """Answers whoever chooses engines. Methods take and return msgpack types."""

    def choose(
        self, prefix: list[Any], seconds: float, options: dict[str, Any], incumbent: str
    ) -> dict[str, Any]:
        """Chooses for every convolution as it is after `prefix`; returns a `ConvReport`."""
        from steadytorch.conv.frontend import version

        start = time.perf_counter()
        specs = msgspec.convert(prefix, list[TransformSpec])
        device = self._workload.device
        with applied_in_order([transforms.create(s) for s in specs], self._workload) as applied:
            found = _found(applied)
        torch.cuda.empty_cache()
        counts = {problem: len(names) for problem, names in found.items()}
        cold = is_cold(counts, device)
        asked = msgspec.structs.replace(msgspec.convert(options, Options), cold=cold)
        before = read_choices(incumbent)
        outcomes: dict[str, Outcome] = {}
        with torch.no_grad():
            # The largest first: they matter most where time runs out.
            for problem in sorted(counts, key=lambda p: -p.traffic_bytes * counts[p]):
                left = seconds - (time.perf_counter() - start)
                if left <= 0:
                    break
                within = msgspec.structs.replace(asked, seconds=min(asked.seconds, left))
                with suppress(torch.OutOfMemoryError):
                    outcome = choose(problem, device, within, before.get(problem.key))
                    outcomes[problem.key] = outcome
        chosen = {key: read_choice(o.choice) for key, o in outcomes.items()}
        for problem in counts:
            chosen.setdefault(problem.key, before.get(problem.key, Choice("aten")))
        layers = tuple(_layer(p, names, outcomes.get(p.key)) for p, names in found.items())
        took = time.perf_counter() - start
        rates = _rates(next(iter(counts), None), str(device))
        report = ConvReport(layers, write_choices(chosen), cold, *rates, version(), took)
        return msgspec.to_builtins(report)


def _found(workload: Workload) -> dict[ConvProblem, list[str]]:
    """The distinct problems of a workload, in order, with the names of their layers."""
    found: dict[ConvProblem, list[str]] = {}
    for convolution in engine_convolutions(rewritten_model(workload)):
        if convolution.problem is not None:
            found.setdefault(convolution.problem, []).append(convolution.label)
    return found


def _rates(problem: ConvProblem | None, device: str) -> tuple[float, float]:
    """What this machine can do, measured: operations per second, and bytes per second."""
    dtype = torch.float32 if problem is None else DTYPES[problem.number]
    return matrix_rate(device, dtype), copy_bandwidth(device)


def _layer(problem: ConvProblem, names: list[str], outcome: Outcome | None) -> Layer:
    return Layer(tuple(names), problem.key, outcome, problem.operations, problem.traffic_bytes)


def choose_engines(
    workload: Workload,
    *,
    prefix: Candidate = (),
    device: str = "cuda",
    deadline_s: float = 60.0,
    deterministic: bool = False,
    incumbent: str = "",
    directory: Path | None = None,
) -> ConvReport:
    """Chooses an engine for every convolution of a workload, in a worker process.

    Args:
        workload: as it came; it is not run in this process.
        prefix: transforms under which the engines are to run: element type and layout decide.
        device: a CUDA device.
        deadline_s: seconds of choosing; convolutions not reached keep PyTorch's choice.
        deterministic: whether engines must give the same bits on every run by cuDNN's own notes.
            Those that differ between two runs are left out in any case.
        incumbent: choices made before; each is kept unless another engine is clearly faster.
        directory: with the workload's payload in it; None to write one.

    Raises:
        WorkerFault: the worker raised (the frontend is missing, say), died or took too long.
        UsageError: the workload cannot be sent to a worker.
    """
    own = directory is None
    place = Path(tempfile.mkdtemp(prefix="steadytorch-")) if directory is None else directory
    worker = None
    try:
        if own:
            save_payload(workload, place)
        worker = Worker(HANDLER, place, "engines")
        worker.call("load", START_S, device=device, ambient=transforms.ambient())
        options = Options(filters=Filters(deterministic=deterministic))
        found = worker.call(
            "choose",
            START_S + deadline_s,
            prefix=msgspec.to_builtins(prefix),
            seconds=deadline_s,
            options=msgspec.to_builtins(options),
            incumbent=incumbent,
        )
    finally:
        if worker is not None:
            worker.close()
        if own:
            shutil.rmtree(place, ignore_errors=True)
    return msgspec.convert(found, ConvReport)


def engine_choices(
    workload: Workload,
    prefix: Candidate,
    device: str,
    deadline_s: float,
    directory: Path | None = None,
    incumbent: str = "",
) -> str:
    """The parameter of `cudnn_engines` for a workload under `prefix`; see `choose_engines`."""
    report = choose_engines(
        workload,
        prefix=prefix,
        device=device,
        deadline_s=deadline_s,
        directory=directory,
        incumbent=incumbent,
    )
    return report.choices
