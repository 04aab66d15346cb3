"""Choosing engines by measurement, on the device they are to run on.

All engines that may be used are built, verified and warmed up; then they race in random order,
PyTorch's own choices among them, and losers drop out early.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from steadytorch.conv.check import Operands, Verified, addresses, operands, verify
from steadytorch.conv.choices import ATEN, Choice
from steadytorch.conv.engines import OUTPUT, Engine, Filters, list_engines
from steadytorch.conv.handles import target
from steadytorch.conv.module import pad_channels
from steadytorch.conv.plans import DTYPES, Plan, empty
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.timing import (
    BENCHMARK,
    NOISE,
    Arm,
    Flush,
    Measured,
    by_pytorch,
    record_all,
    take_rounds,
)
from steadytorch.errors import SteadyError
from steadytorch.measure.race import ALPHA
from steadytorch.measure.statistics import signed_rank_interval

KEPT = 0.03
"""An engine chosen before is kept unless another is shown to be faster by more than this."""
ERROR_FACTOR = 2.0
"""An engine's error may be this many times that of PyTorch's own in the problem's element type, as
for class `same`; also where it computes in the other 16-bit type."""


class Options(msgspec.Struct, frozen=True):
    """How to choose.

    Attributes:
        filters: which engines may be used.
        cold: whether the L2 cache is flushed before each run, as in a network whose tensors do not
            all fit into it.
        seconds: for one problem at the most.
        seed: of operands and order.
        other_half: whether fp16 may be tried in place of bf16, the result converted back. What is
            verified here are errors on random operands of size 1: whether a network's own values
            lie in the range of fp16 is for the caller to know (see `headroom`).
        padded: whether input channels may be padded, and weights with them; not while these change.
    """

    filters: Filters = Filters()
    cold: bool = True
    seconds: float = 8.0
    seed: int = 0
    other_half: bool = False
    padded: bool = True


class Outcome(msgspec.Struct, frozen=True):
    """What was found for one problem.

    Attributes:
        problem: its key.
        choice: as text.
        default_ns: PyTorch's own choice, its epilogue in kernels of its own.
        benchmark_ns: likewise with its benchmark mode on.
        chosen_ns: the chosen one.
        engines: the field, fastest first, then those excluded.
        seconds: that it took.
    """

    problem: str
    choice: str
    default_ns: float | None
    benchmark_ns: float | None
    chosen_ns: float | None
    engines: tuple[Measured, ...]
    seconds: float

    @property
    def chosen(self) -> Measured:
        """The chosen one in the field."""
        return next(engine for engine in self.engines if engine.choice == self.choice)


def choose(
    problem: ConvProblem,
    device: torch.device,
    options: Options | None = None,
    incumbent: Choice | None = None,
) -> Outcome:
    """Measures every engine for a problem and chooses one.

    Args:
        problem: what is to be computed.
        device: a CUDA device; this process should have it to itself.
        options: how.
        incumbent: chosen before; see `stays`.

    Raises:
        UnsupportedError: the frontend or cuDNN is missing.
    """
    options = options or Options()
    start = time.perf_counter()
    rng = Random(f"{options.seed} {problem.key}")
    given = operands(problem, device, options.seed)
    own_error = given.error_of(given.by_pytorch())
    arms, excluded = by_pytorch(given, own_error), []
    for variant, choice in variants(problem, options):
        found, refused = _engines(variant, choice, given, own_error, options)
        arms.extend(found)
        excluded.extend(refused)
    flush = Flush(device, given.first) if options.cold else None
    deadline = start + options.seconds
    before = None if incumbent is None else str(incumbent)
    record_all(arms)
    take_rounds(arms, flush, rng, lambda: time.perf_counter() > deadline, before)
    measured = sorted((arm.summary() for arm in arms), key=lambda m: m.median_ns or np.inf)
    by_name = {m.choice: m for m in measured}
    kept = before is not None and stays({arm.found.choice: arm.times_ns for arm in arms}, before)
    chosen = by_name[before] if before is not None and kept else pick(measured)
    return Outcome(
        problem=problem.key,
        choice=chosen.choice,
        default_ns=by_name[ATEN].median_ns,
        benchmark_ns=by_name[BENCHMARK].median_ns,
        chosen_ns=chosen.median_ns,
        engines=(*measured, *excluded),
        seconds=time.perf_counter() - start,
    )


def stays(times_ns: Mapping[str, Sequence[float]], incumbent: str) -> bool:
    """Whether an engine that was chosen before is to stay.

    It is, unless another is shown to be faster by more than `KEPT`: the exact interval of their
    paired blocks (signed ranks), at `ALPHA` shared out among the others, lies beyond it. Medians
    alone would let kernels of a few microseconds take turns from run to run.

    Args:
        times_ns: by choice, of blocks in the order of the rounds, which all ran from the first on;
            those that dropped out have fewer.
        incumbent: the choice made before; one that is not among them does not stay.
    """
    if incumbent not in times_ns:
        return False
    others = [name for name in times_ns if name not in (incumbent, BENCHMARK)]
    level = ALPHA / max(1, len(others))
    own = np.log(times_ns[incumbent])
    for name in others:
        count = min(len(own), len(times_ns[name]))
        slower = own[:count] - np.log(times_ns[name][:count])
        interval = signed_rank_interval(slower, level)
        if interval is not None and interval[0] > np.log1p(KEPT):
            return False
    return True


def pick(measured: Sequence[Measured]) -> Measured:
    """The choice among engines that were timed, fastest first, where none was made before.

    Within the noise band of the fastest: the smallest workspace, then the name. PyTorch's own only
    where it is faster than all others by more than the band.
    """
    timed = [m for m in measured if m.median_ns is not None and m.choice != BENCHMARK]
    engines = [m for m in timed if m.choice != ATEN]
    fastest = timed[0].median_ns or 0.0
    near = [m for m in engines if (m.median_ns or 0.0) <= fastest * (1 + NOISE)]
    if not near:
        return timed[0]
    return min(near, key=lambda m: (m.workspace_bytes or 0, m.choice))


def variants(problem: ConvProblem, options: Options) -> Iterator[tuple[ConvProblem, Choice]]:
    """The problem itself, and others by which the same result can be computed.

    Few input channels are padded to 4 and 8 with zeros, where cuDNN has other engines; the other
    16-bit type is tried where that is allowed.
    """
    numbers: list[Any] = [None]
    if options.other_half and problem.number == "bf16":
        numbers.append("fp16")
    channels: list[int | None] = [None]
    few = problem.input[1] < 8 and problem.groups == 1 and problem.operation == "fprop"
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


def _engines(
    problem: ConvProblem, choice: Choice, given: Operands, own_error: float, options: Options
) -> tuple[list[Arm], list[Measured]]:
    """Engines of one variant: those that may run, verified, and those that may not."""
    device = given.first.device
    arms: list[Arm] = []
    refused: list[Measured] = []
    try:
        offered = list_engines(problem, target(device), options.filters)
    except SteadyError as error:
        return [], [Measured(str(choice) + "any", excluded=str(error))]
    varied = _varied(given, problem)
    bound = ERROR_FACTOR * own_error
    for engine in offered:
        named = msgspec.structs.replace(choice, engine=engine.name)
        found = _measured(engine, str(named))
        if engine.excluded is not None:
            refused.append(found)
            continue
        try:
            plan = Plan(problem, engine.name, device)
            seen = verify(plan, varied, bound)
        except (SteadyError, torch.OutOfMemoryError) as fault:
            seen, plan = Verified(None, str(fault).splitlines()[0]), None
        found = msgspec.structs.replace(
            found, error=seen.error, excluded=seen.fault, repeats=seen.repeats
        )
        if seen.fault is not None or plan is None:
            refused.append(found)
        else:
            arms.append(_arm(found, plan, given, varied))
    return arms, refused


def _measured(engine: Engine, name: str) -> Measured:
    return Measured(
        name,
        workspace_bytes=engine.workspace_bytes,
        notes=engine.notes,
        excluded=engine.excluded,
    )


def _varied(given: Operands, problem: ConvProblem) -> Operands:
    """The operands as a variant of their problem takes them; the same reference."""
    if problem == given.problem:
        return given
    dtype, added = DTYPES[problem.number], problem.input[1] - given.problem.input[1]
    first, second = (pad_channels(t, added).to(dtype) for t in (given.first, given.second))
    bias, other = (None if t is None else t.to(dtype) for t in (given.bias, given.other))
    return Operands(problem, first, second, bias, other, given.reference)


def _arm(found: Measured, plan: Plan, given: Operands, varied: Operands) -> Arm:
    """Times the plan, and with it the conversion that a variant needs at each call."""
    problem, device = varied.problem, given.first.device
    shape = tuple(given.reference.shape)
    y = empty(shape, DTYPES[problem.number], device, problem.layout)
    scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    pointers = addresses(varied) | {OUTPUT: y.data_ptr()}
    workspace = scratch.data_ptr()

    def run() -> None:
        plan.enqueue(pointers, workspace)

    if problem == given.problem:
        return Arm(found, run, keep=(y, scratch, varied))
    dtype, added = DTYPES[problem.number], problem.input[1] - given.problem.input[1]
    same = dtype == given.first.dtype

    def converted() -> None:
        pad_channels(given.first, added).to(dtype)
        if not same and given.other is not None:
            given.other.to(dtype)
        plan.enqueue(pointers, workspace)
        if not same:
            y.to(given.first.dtype)

    return Arm(found, converted, keep=(y, scratch, varied))


def is_cold(problems: Mapping[ConvProblem, int], device: torch.device) -> bool:
    """Whether tensors of all these convolutions, with their counts, overflow the L2 cache."""
    properties: Any = torch.cuda.get_device_properties(device)
    traffic = sum(problem.traffic_bytes * count for problem, count in problems.items())
    return traffic > properties.L2_cache_size
