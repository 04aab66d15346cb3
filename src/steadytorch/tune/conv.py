"""Chooses cuDNN engines for a workload's convolutions in a worker, before candidates are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from steadytorch import transforms
from steadytorch.bench.bench_worker import WorkloadHandler, save_payload
from steadytorch.conv.choices import ATEN, Choice, read_choice, write_choices
from steadytorch.conv.choose import ChoiceOptions, is_cold, variants
from steadytorch.conv.choose_all import Result, choose_all
from steadytorch.conv.engines import Filters
from steadytorch.conv.executables import DTYPES
from steadytorch.conv.headroom import beyond_fp16
from steadytorch.conv.module import engine_convolutions
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.rewrite import left_out
from steadytorch.conv.training import ProblemRecorder
from steadytorch.device.facts import DeviceFacts
from steadytorch.device.roofline import copy_bandwidth, matrix_rate
from steadytorch.plan.engines import keep_engines, known_engines
from steadytorch.plan.store import Store
from steadytorch.process.folder import shared_folder
from steadytorch.process.fork_server import ForkServer
from steadytorch.process.worker import Worker
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.results.conv import ConvReport, Layer, LeftOut
from steadytorch.transforms.base import applied_in_order
from steadytorch.transforms.cudnn_engines import engined_model, rewritten_model
from steadytorch.workload.workload import Workload

HANDLER = "steadytorch.tune.conv:ConvHandler"
START_S = 120.0
"""Timeout in seconds for starting a worker, loading the workload and tracing it."""
GRACE = 0.1
"""Share of the time for choosing that is added for convolutions not reached in time."""


class FoundProblems(NamedTuple):
    """The distinct convolutions of a workload, in order, each with the names of its layers.

    Attributes:
        problems: those that engines can run.
        left_out: the others, keyed by the reason.
    """

    problems: dict[ConvProblem, list[str]]
    left_out: dict[str, list[str]]


class ConvHandler(WorkloadHandler):
    """Worker handler that chooses engines. Methods take and return msgpack types."""

    def choose(
        self, prefix: list[Any], seconds: float, options: dict[str, Any], incumbent: dict[str, str]
    ) -> dict[str, Any]:
        """Chooses an engine per convolution under the transforms `prefix`; returns `ConvReport`."""
        from steadytorch.conv.frontend import version

        start = time.perf_counter()
        cudnn = version()  # raises if cuDNN's frontend is unavailable
        specs = msgspec.convert(prefix, list[TransformSpec])
        device = self.workload.device
        training = self.workload.is_training
        found = (problems_in_training if training else problems_in)(self.workload, specs)
        counts = {problem: len(names) for problem, names in found.problems.items()}
        # Before engines run: a failing engine may leave the device unusable.
        rates = machine_rates(next(iter(counts), None), str(device))
        torch.cuda.empty_cache()
        cold = is_cold(counts, device)
        asked = msgspec.structs.replace(
            msgspec.convert(options, ChoiceOptions), cold=cold, padded=not training
        )
        barred = keys_beyond_fp16(self.workload, specs) if asked.other_half else set()
        options_of = {
            problem: msgspec.structs.replace(
                asked, other_half=asked.other_half and problem.key not in barred
            )
            for problem in counts
        }
        before = incumbents(options_of, incumbent)
        results = choose_all(options_of, counts, before, device, start + seconds, GRACE * seconds)
        chosen = {key: one.choice for key, one in results.items() if one.choice is not None}
        chosen = chosen or {problem.key: Choice(ATEN) for problem in counts}
        layers = tuple(_layer(p, names, results[p.key]) for p, names in found.problems.items())
        others = tuple(LeftOut(tuple(names), reason) for reason, names in found.left_out.items())
        took = time.perf_counter() - start
        report = ConvReport(layers, write_choices(chosen), cold, *rates, cudnn, took, others)
        return msgspec.to_builtins(report)


def incumbents(
    options_of: Mapping[ConvProblem, ChoiceOptions], given: Mapping[str, str]
) -> dict[str, Choice]:
    """Earlier engine choices that the options still allow, by key of the convolution problem."""
    found: dict[str, Choice] = {}
    for problem, options in options_of.items():
        if problem.key in given:
            choice = read_choice(given[problem.key])
            ways = [(way.channels, way.number) for _, way in variants(problem, options)]
            if (choice.channels, choice.number) in ways:
                found[problem.key] = choice
    return found


def keys_beyond_fp16(workload: Workload, prefix: Sequence[TransformSpec]) -> set[str]:
    """Keys of convolutions whose values on the workload's inputs come too near fp16's limits."""
    with applied_in_order([transforms.create(spec) for spec in prefix], workload) as applied:
        model = rewritten_model(applied)
        return beyond_fp16(model, lambda: model(*applied.inputs, **applied.kwargs))


def problems_in(workload: Workload, prefix: Sequence[TransformSpec]) -> FoundProblems:
    """The convolutions of an inference workload under the transforms `prefix`."""
    problems: dict[ConvProblem, list[str]] = {}
    with applied_in_order([transforms.create(spec) for spec in prefix], workload) as applied:
        model = rewritten_model(applied)
        for convolution in engine_convolutions(model):
            if convolution.problem is not None:
                problems.setdefault(convolution.problem, []).append(convolution.label)
    return FoundProblems(problems, left_out(model))


def problems_in_training(workload: Workload, prefix: Sequence[TransformSpec]) -> FoundProblems:
    """The convolutions and gradients of a training step, recorded in one forward pass."""
    recorder = ProblemRecorder()
    # Training transforms wrap the model, so engines go inside all of them.
    inner = workload.with_model(engined_model(workload.model, recorder))
    with applied_in_order([transforms.create(spec) for spec in prefix], inner) as applied:
        applied.model(*workload.inputs, **workload.kwargs)
    return FoundProblems(recorder.found, recorder.left_out)


def machine_rates(problem: ConvProblem | None, device: str) -> tuple[float, float]:
    """Measured rates of the device: matrix operations per second and bytes per second."""
    dtype = torch.float32 if problem is None else DTYPES[problem.number]
    return matrix_rate(device, dtype), copy_bandwidth(device)


def _layer(problem: ConvProblem, names: list[str], result: Result) -> Layer:
    size = (problem.operations, problem.traffic_bytes)
    return Layer.of(tuple(names), problem.key, result.outcome, *size, result.reason)


def start_chooser(
    directory: Path, device: str, ambient: dict[str, str], server: ForkServer | None = None
) -> Worker:
    """Starts a worker for `choose_engines` and has it load the workload.

    Args:
        directory: folder with the workload's payload.
        device: a CUDA device.
        ambient: the caller's process-wide settings, which the worker adopts.
        server: forks the worker; None to start an interpreter.
    """
    worker = Worker(HANDLER, directory, "engines", server=server)
    worker.send("load", device=device, ambient=ambient)
    return worker


def choose_engines(
    workload: Workload,
    *,
    prefix: Candidate = (),
    device: str = "cuda",
    deadline_s: float = 60.0,
    deterministic: bool = False,
    other_half: bool = False,
    incumbent: Mapping[str, Choice] | None = None,
    worker: Worker | None = None,
    wait: Callable[[Worker, float], Any] = Worker.receive,
) -> ConvReport:
    """Chooses an engine for every convolution of a workload, in a worker process.

    Args:
        workload: the untouched workload; not run in this process.
        prefix: transforms that engines run under; they set dtype and memory layout.
        device: a CUDA device.
        deadline_s: seconds for choosing. Convolutions not reached in time keep an earlier choice
            if it verifies, else get the first engine that does. One that raises is left to PyTorch.
        deterministic: whether to take only engines that cuDNN documents as bitwise reproducible.
            `torch.backends.cudnn.deterministic` and `torch.use_deterministic_algorithms` imply
            this. Engines that differ between two runs are always excluded.
        other_half: whether bf16 convolutions may run in fp16, with results converted back. Tried
            only where all values on the workload's inputs leave room in fp16's range
            (`headroom`); the caller must verify the whole workload.
        incumbent: earlier choices by problem key, possibly for problems of other workloads. Each
            stays unless another engine is clearly faster (`decide.stays`).
        worker: a worker from `start_chooser`, closed at the end; None to start one.
        wait: returns the worker's answer, given the worker and a timeout in seconds.

    Raises:
        WorkerFault: the worker raised (for example, the frontend is missing), died or timed out.
        UsageError: the workload cannot be sent to a worker.
    """
    with ExitStack() as at_the_end:
        if worker is None:
            own = at_the_end.enter_context(shared_folder())
            save_payload(workload, own)
            worker = start_chooser(own, device, transforms.ambient())
        at_the_end.callback(worker.close)
        wait(worker, START_S)
        options = ChoiceOptions(filters=Filters(deterministic=deterministic), other_half=other_half)
        worker.send(
            "choose",
            prefix=msgspec.to_builtins(prefix),
            seconds=deadline_s,
            options=msgspec.to_builtins(options),
            incumbent={key: str(choice) for key, choice in (incumbent or {}).items()},
        )
        found = wait(worker, START_S + deadline_s)
    return msgspec.convert(found, ConvReport)


def choose_and_keep(
    workload: Workload,
    facts: DeviceFacts,
    plans: Store,
    *,
    prefix: Candidate = (),
    device: str = "cuda",
    **asked: Any,
) -> ConvReport:
    """Chooses engines starting from engines stored for this device, and stores the result.

    Args:
        workload: the untouched workload; not run in this process.
        facts: facts about the device.
        plans: the plan store.
        prefix: transforms that engines run under.
        device: a CUDA device.
        asked: further arguments of `choose_engines`.

    Raises:
        WorkerFault: see `choose_engines`.
        UsageError: see `choose_engines`.
    """
    known = known_engines(facts, plans)
    report = choose_engines(workload, prefix=prefix, device=device, incumbent=known, **asked)
    found = {
        layer.problem: read_choice(layer.outcome.choice)
        for layer in report.layers
        if layer.outcome is not None and layer.reason is None
    }
    keep_engines(workload, prefix, facts, found, plans)
    return report
