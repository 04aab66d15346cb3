"""Verification of engines: two runs, compared with a reference, in guarded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from steadytorch.conv.aten_fallback import aten_conv, aten_conv_grad
from steadytorch.conv.engines import BIAS, INPUT, OTHER, OUTPUT, WEIGHT
from steadytorch.conv.executables import DTYPES, EngineExecutable, Geometry, empty
from steadytorch.conv.problem import ConvProblem, strides

GUARD_BYTES = 4096
"""Size of each guard zone; a multiple of the alignment that engines rely on."""
_PATTERN = 0xA5


class ProblemTensors(msgspec.Struct, frozen=True):
    """Operands of one convolution problem on a device, with the reference result.

    Attributes:
        problem: the problem.
        first: the input, or the gradient of the output (dgrad).
        second: the weight, or the gradient of the output (wgrad).
        bias: the bias, or None.
        other: the residual, or None.
        reference: the result in float32, or in float64 for problems in float32.
    """

    problem: ConvProblem
    first: Any
    second: Any
    bias: Any
    other: Any
    reference: Any

    @property
    def geometry(self) -> Geometry:
        """Stride, padding, dilation and groups of the convolution."""
        return geometry_of(self.problem)

    def by_pytorch(self) -> Tensor:
        """Compute the convolution by PyTorch, in the precision of the problem."""
        with _float32_as("tf32" if self.problem.number == "tf32" else "ieee"):
            return _computed(self.problem, self.first, self.second, self.bias, self.other)

    def error_of(self, result: Tensor) -> float:
        """Relative L2 error of a result; NaN if the result contains NaN."""
        wide = self.reference
        difference = torch.linalg.vector_norm(result.to(wide.dtype) - wide)
        return float(difference / torch.linalg.vector_norm(wide))


def geometry_of(problem: ConvProblem) -> Geometry:
    """Stride, padding, dilation and groups of a problem."""
    return problem.stride, problem.padding, problem.dilation, problem.groups


def operands(problem: ConvProblem, device: torch.device, seed: int = 0) -> ProblemTensors:
    """Draw random operands, scaled so that results are about 1, and compute the reference."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[problem.number]

    def drawn(shape: tuple[int, ...], scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return empty(shape, dtype, device, problem.layout).copy_(values)

    shapes = {
        "fprop": (problem.input, problem.weight),
        "dgrad": (problem.output, problem.weight),
        "wgrad": (problem.input, problem.output),
    }[problem.operation]
    first = drawn(shapes[0], 1.0)
    second = drawn(shapes[1], _terms(problem) ** -0.5)
    bias = drawn((problem.weight[0],), 1.0) if problem.biased else None
    other = drawn(problem.output, 1.0) if problem.adds else None
    wide = torch.float32 if dtype != torch.float32 else torch.float64
    given = [None if t is None else t.to(wide) for t in (first, second, bias, other)]
    with _float32_as("ieee"):
        reference = _computed(problem, *given)
    return ProblemTensors(problem, first, second, bias, other, reference)


def _terms(problem: ConvProblem) -> int:
    """Number of products summed per element of the result; for dgrad, the number for fprop."""
    if problem.operation == "wgrad":
        return math.prod(problem.output) // problem.output[1]
    return math.prod(problem.weight[1:])


@contextmanager
def _float32_as(precision: str) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = precision
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before


def _computed(problem: ConvProblem, first: Any, second: Any, bias: Any, other: Any) -> Tensor:
    geometry = geometry_of(problem)
    if problem.operation == "fprop":
        return aten_conv(first, second, bias, other, problem.rectified, geometry)
    shapes = (problem.input, problem.weight)
    return aten_conv_grad(first, second, shapes, geometry, problem.operation, problem.layout)


class Guarded:
    """Device memory between two guard zones, which reveal writes out of bounds.

    Args:
        size: usable bytes.
        device: a CUDA device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        rounded = -(-size // 256) * 256
        self._all = torch.full(
            (rounded + 2 * GUARD_BYTES,), _PATTERN, dtype=torch.uint8, device=device
        )
        self.inner = self._all[GUARD_BYTES : GUARD_BYTES + size]
        self._size = size

    @property
    def intact(self) -> bool:
        """Whether the guard zones are unchanged."""
        outside = (self._all[:GUARD_BYTES], self._all[GUARD_BYTES + self._size :])
        return all(bool((zone == _PATTERN).all()) for zone in outside)


class Verified(NamedTuple):
    """Result of verifying a cuDNN plan.

    Attributes:
        error: relative L2 error; None if it could not be computed.
        fault: why the plan must not be used, or None.
        repeats: whether both runs were bitwise equal; None if they were not compared.
    """

    error: float | None
    fault: str | None
    repeats: bool | None = None


def verify(plan: EngineExecutable, given: ProblemTensors, bound: float) -> Verified:
    """Run a cuDNN plan twice into NaN-filled output and compare the result with the reference.

    Args:
        plan: a built plan.
        given: the operands and the reference result.
        bound: maximum relative L2 error.
    """
    problem, device = given.problem, given.first.device
    dtype, shape = DTYPES[problem.number], tuple(given.reference.shape)
    output = Guarded(math.prod(shape) * dtype.itemsize, device)
    scratch = Guarded(plan.workspace_bytes, device)
    result = output.inner.view(dtype).as_strided(shape, strides(shape, problem.layout))
    pointers = addresses(given) | {OUTPUT: result.data_ptr()}
    runs = []
    for _ in range(2):
        result.fill_(float("nan"))
        if not plan.enqueue(pointers, scratch.inner.data_ptr()):
            return Verified(None, "does not run")
        runs.append(result.clone())
    error = given.error_of(runs[0])
    if not math.isfinite(error):
        return Verified(None, "leaves parts of the output unwritten or not finite")
    repeats = torch.equal(runs[0], runs[1])
    if not (output.intact and scratch.intact):
        return Verified(error, "writes outside of its output or workspace", repeats)
    if error > bound:
        return Verified(error, f"relative error {error:.1e} exceeds {bound:.1e}", repeats)
    return Verified(error, None if repeats else "results differ from run to run", repeats)


def addresses(given: ProblemTensors) -> dict[int, int]:
    """Device addresses of the operands, by tensor ID of the cuDNN graph."""
    tensors = {INPUT: given.first, WEIGHT: given.second, BIAS: given.bias, OTHER: given.other}
    return {uid: tensor.data_ptr() for uid, tensor in tensors.items() if tensor is not None}
