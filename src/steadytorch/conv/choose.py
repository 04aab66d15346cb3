"""Choose convolution engines by measurement on the target device.

All permitted engines are built, verified and run once. Those that are not far behind, and PyTorch's
own convolutions, are timed in random order, and slow engines drop out early.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch.conv.blocks import Flush
from steadytorch.conv.check import ProblemTensors, addresses, operands, verify
from steadytorch.conv.choices import ATEN, Choice
from steadytorch.conv.decide import pick, stays
from steadytorch.conv.engines import OUTPUT, Engine, Filters, list_engines
from steadytorch.conv.executables import DTYPES, EngineExecutable, empty
from steadytorch.conv.handles import target
from steadytorch.conv.module import pad_channels
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.timing import (
    BENCHMARK,
    Arm,
    Measured,
    barred,
    by_pytorch,
    promising,
    record_all,
    take_rounds,
)
from steadytorch.errors import UnsupportedError
from steadytorch.results.conv import ConvOutcome

ERROR_FACTOR = 2.0
"""Maximum error of an engine, as a multiple of PyTorch's error in the problem's element type.

The bound also holds for engines that compute in the other 16-bit type.
"""
BUILDING = 0.5
"""Share of a problem's time for building and verifying; the rest is for timing."""


class ChoiceOptions(msgspec.Struct, frozen=True):
    """Options of a choice.

    Attributes:
        filters: which engines are permitted.
        cold: whether to flush the L2 cache before each run, for networks that overflow it.
        seconds: time limit for one problem. After half of it, no more engines are built; at its
            end, no more rounds are run. Work in progress is finished.
        seed: seed of operands and order.
        other_half: whether fp16 may be tried instead of bf16 where the input has fewer than 8
            channels, with the result converted back. Elsewhere it was never the fastest. Only
            the error on random operands of about 1 is verified here. The caller must check that the
            network's values are in the range of fp16 (see `headroom`).
        padded: whether input channels and weights may be padded; False if weights change.
    """

    filters: Filters = Filters()
    cold: bool = True
    seconds: float = 8.0
    seed: int = 0
    other_half: bool = False
    padded: bool = True


def choose(
    problem: ConvProblem,
    device: torch.device,
    options: ChoiceOptions | None = None,
    incumbent: Choice | None = None,
) -> ConvOutcome:
    """Measure every cuDNN engine for a convolution and choose the engine to use.

    An engine that raises while it is built, verified, recorded or timed is excluded, with the
    exception's message as the reason. All other exceptions propagate.

    Args:
        problem: the convolution.
        device: a CUDA device that no other process uses.
        options: see `ChoiceOptions`.
        incumbent: the earlier choice; see `stays`.

    Raises:
        UnsupportedError: the frontend or cuDNN is missing, every engine failed, or an engine made
            the device unusable for this process.
    """
    options = options or ChoiceOptions()
    start = time.perf_counter()
    rng = Random(f"{options.seed} {problem.key}")
    given = operands(problem, device, options.seed)
    own_error = given.error_of(given.by_pytorch())
    arms, excluded = by_pytorch(given, own_error), []
    own = len(arms)
    for tried in _field(problem, given, own_error, options, incumbent):
        if isinstance(tried, Arm):
            arms.append(tried)
        else:
            excluded.append(tried)
        if len(arms) > own and time.perf_counter() > start + BUILDING * options.seconds:
            reason = "not tried: engine build budget exhausted"
            excluded.append(Measured("any other", excluded=reason))
            break
    flush = Flush(device, given.first) if options.cold else None
    deadline = start + options.seconds
    before = None if incumbent is None else str(incumbent)
    recorded = record_all(promising(arms, flush, before))
    take_rounds(recorded, flush, rng, lambda: time.perf_counter() > deadline, before)
    found = [arm.summary() for arm in arms]
    excluded.extend(m for m in found if m.excluded is not None)
    measured = sorted((m for m in found if m.excluded is None), key=lambda m: m.median_ns or np.inf)
    by_name = {m.choice: m for m in measured}
    times = {arm.found.choice: arm.times_ns for arm in arms if arm.found.choice in by_name}
    kept = before is not None and stays(times, before)
    chosen = by_name[before] if before is not None and kept else pick(measured)
    return ConvOutcome(
        problem=problem.key,
        choice=chosen.choice,
        default_ns=_median_ns(by_name.get(ATEN)),
        benchmark_ns=_median_ns(by_name.get(BENCHMARK)),
        chosen_ns=chosen.median_ns,
        engines=(*measured, *excluded),
        seconds=time.perf_counter() - start,
    )


def first_sound(
    problem: ConvProblem,
    device: torch.device,
    options: ChoiceOptions | None = None,
    incumbent: Choice | None = None,
) -> ConvOutcome:
    """Choose the first engine in cuDNN's order that builds and verifies, without timing.

    Args:
        problem: the convolution.
        device: a CUDA device.
        options: permitted engines and seed of operands.
        incumbent: the earlier choice, which is tried first.

    Raises:
        UnsupportedError: no engine verifies, or the frontend or cuDNN is missing.
    """
    options = options or ChoiceOptions()
    start = time.perf_counter()
    given = operands(problem, device, options.seed)
    own_error = given.error_of(given.by_pytorch())
    excluded: list[Measured] = []
    for tried in _field(problem, given, own_error, options, incumbent):
        if isinstance(tried, Arm):
            took = time.perf_counter() - start
            engines = (tried.found, *excluded)
            return ConvOutcome(problem.key, tried.found.choice, None, None, None, engines, took)
        excluded.append(tried)
    raise UnsupportedError(f"every cuDNN engine failed verification for {problem.key}")


def _median_ns(found: Measured | None) -> float | None:
    return None if found is None else found.median_ns


def variants(problem: ConvProblem, options: ChoiceOptions) -> Iterator[tuple[ConvProblem, Choice]]:
    """Yield the problem and variants of it that compute the same result.

    An input with fewer than 8 channels is also padded to 4 and 8 channels, for which cuDNN has
    other engines. With `options.other_half`, such a problem in bf16 is also tried in fp16.
    """
    few = problem.input[1] < 8 and problem.groups == 1 and problem.operation == "fprop"
    numbers: list[Any] = [None]
    if few and options.other_half and problem.number == "bf16":
        numbers.append("fp16")
    channels: list[int | None] = [None]
    if options.padded and few and problem.layout == "last" and problem.number != "fp32":
        channels.extend(c for c in (4, 8) if c > problem.input[1])
    for number in numbers:
        for count in channels:
            yield _variant(problem, number, count), Choice("", count, number)


def _variant(problem: ConvProblem, number: Any, channels: int | None) -> ConvProblem:
    changed = problem
    if number is not None:
        changed = msgspec.structs.replace(changed, number=number)
    if channels is not None:
        n, _, *rest = problem.input
        k, _, *kernel = problem.weight
        changed = msgspec.structs.replace(
            changed, input=(n, channels, *rest), weight=(k, channels, *kernel)
        )
    return changed


def _field(
    problem: ConvProblem,
    given: ProblemTensors,
    own_error: float,
    options: ChoiceOptions,
    incumbent: Choice | None,
) -> Iterator[Arm | Measured]:
    """Yield the engines of all variants; the earlier choice comes first, in case time is short."""
    ways = list(variants(problem, options))
    if incumbent is not None:
        way = (incumbent.channels, incumbent.number)
        ways.sort(key=lambda pair: (pair[1].channels, pair[1].number) != way)
    for variant, choice in ways:
        yield from _engines(variant, choice, given, own_error, options, incumbent)


def _engines(
    problem: ConvProblem,
    choice: Choice,
    given: ProblemTensors,
    own_error: float,
    options: ChoiceOptions,
    incumbent: Choice | None = None,
) -> Iterator[Arm | Measured]:
    """Yield a variant's engines in cuDNN's order: an `Arm` if usable, else a `Measured`."""
    device = given.first.device
    try:
        offered = list_engines(problem, target(device), options.filters)
        varied = _varied(given, problem)
    except Exception as fault:
        yield barred(Measured(f"{choice}any"), fault)
        return
    if incumbent is not None:
        offered.sort(key=lambda engine: engine.name != incumbent.engine)
    bound = ERROR_FACTOR * own_error
    for engine in offered:
        found = _measured(engine, str(msgspec.structs.replace(choice, engine=engine.name)))
        if engine.excluded is not None:
            yield found
            continue
        try:
            tried = _tried(
                found, EngineExecutable(problem, engine.name, device), given, varied, bound
            )
        except Exception as fault:
            tried = barred(found, fault)
        yield tried


def _tried(
    found: Measured,
    plan: EngineExecutable,
    given: ProblemTensors,
    varied: ProblemTensors,
    bound: float,
) -> Arm | Measured:
    """Verify a built plan; return an `Arm` to time, or `Measured` with the reason for exclusion."""
    seen = verify(plan, varied, bound)
    found = msgspec.structs.replace(
        found, error=seen.error, excluded=seen.fault, repeats=seen.repeats
    )
    return found if seen.fault is not None else _arm(found, plan, given, varied)


def _measured(engine: Engine, name: str) -> Measured:
    return Measured(
        name,
        workspace_bytes=engine.workspace_bytes,
        notes=engine.notes,
        excluded=engine.excluded,
    )


def _varied(given: ProblemTensors, problem: ConvProblem) -> ProblemTensors:
    """Convert operands to a variant of their problem; the reference result is unchanged."""
    if problem == given.problem:
        return given
    dtype, added = DTYPES[problem.number], problem.input[1] - given.problem.input[1]
    first, second = (pad_channels(t, added).to(dtype) for t in (given.first, given.second))
    bias, other = (None if t is None else t.to(dtype) for t in (given.bias, given.other))
    return ProblemTensors(problem, first, second, bias, other, given.reference)


def _arm(
    found: Measured, plan: EngineExecutable, given: ProblemTensors, varied: ProblemTensors
) -> Arm:
    """Make an `Arm` that times the plan together with the conversions that a variant needs."""
    problem, device = varied.problem, given.first.device
    shape = tuple(given.reference.shape)
    y = empty(shape, DTYPES[problem.number], device, problem.layout)
    scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    pointers = addresses(varied) | {OUTPUT: y.data_ptr()}
    workspace = scratch.data_ptr()

    def run() -> None:
        # Without this check, a plan that fails to launch would look fastest.
        if not plan.enqueue(pointers, workspace):
            raise UnsupportedError("no longer runs")

    if problem == given.problem:
        return Arm(found, run, keep=(y, scratch, varied))
    dtype, added = DTYPES[problem.number], problem.input[1] - given.problem.input[1]
    same = dtype == given.first.dtype

    def converted() -> None:
        pad_channels(given.first, added).to(dtype)
        if not same and given.other is not None:
            given.other.to(dtype)
        run()
        if not same:
            y.to(given.first.dtype)

    return Arm(found, converted, keep=(y, scratch, varied))


def is_cold(problems: Mapping[ConvProblem, int], device: torch.device) -> bool:
    """Whether the memory traffic of `problems` (with call counts) exceeds the L2 cache size."""
    properties: Any = torch.cuda.get_device_properties(device)
    traffic = sum(problem.traffic_bytes * count for problem, count in problems.items())
    return traffic > properties.L2_cache_size
