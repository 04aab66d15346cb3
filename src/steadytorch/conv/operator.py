"""The operator `conv_engine`: runs a convolution with a chosen engine, or falls back to PyTorch.

`torch.ops.steadytorch.conv_engine` works in eager mode, in CUDA graphs, and as one operator under
`torch.compile` and `torch.export`. If an engine is missing, fails to build or does not fit the
tensors, PyTorch runs the convolution. `executables.MISSES` and the log give the reason for each
fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import _profiler_enabled

from steadytorch.conv.aten_fallback import aten_conv, aten_conv_grad
from steadytorch.conv.choices import ATEN
from steadytorch.conv.executables import (
    RUNNERS,
    Geometry,
    Runner,
    as_laid_out,
    check_operands,
    empty,
    memory_layout,
    note_miss,
    number_of,
    planned,
    problem_of,
)
from steadytorch.conv.problem import ConvProblem, Layout, Operation
from steadytorch.errors import SteadyError, UnsupportedError, one_line

_FITTING = (
    "engines need fp16, bf16 or float32, operands without broadcasting, and a bias with any add "
    "or ReLU"
)
_PLAIN = (Tensor, torch.nn.Parameter)


_LIBRARY = torch.library.Library("steadytorch", "FRAGMENT")
_LIBRARY.define(
    "conv_engine(Tensor x, Tensor weight, Tensor? bias, Tensor? other, int[] stride, "
    "int[] padding, int[] dilation, int groups, bool relu, str engine, str dgrad, str wgrad) "
    "-> Tensor",
    # Plans are made for one layout, so Inductor must pass tensors with the traced strides.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)
_LIBRARY.define(
    "conv_engine_grad(Tensor first, Tensor second, int[] input, int[] weight, int[] stride, "
    "int[] padding, int[] dilation, int groups, str operation, str layout, str engine) -> Tensor",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


def _impl(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    relu: bool,
    engine: str,
    dgrad: str,
    wgrad: str,
) -> Tensor:
    geometry = (tuple(stride), tuple(padding), tuple(dilation), groups)
    return runner_of(x, weight, bias, other, geometry, relu, engine)(x, weight, bias, other)


def runner_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    geometry: Geometry,
    relu: bool,
    engine: str,
) -> Runner:
    """Get this thread's runner for convolution calls with these shapes, layouts and settings.

    Args:
        x: the input.
        weight: the weight.
        bias: the bias, or None.
        other: the residual, or None.
        geometry: stride, padding and dilation as tuples, and groups.
        relu: whether to apply ReLU.
        engine: the plan's name, or ATEN or HEURISTIC.
    """
    key = (
        *(engine, relu, geometry, number_of(x.dtype) or x.dtype, x.device, x.shape, x.stride()),
        *(weight.dtype, weight.get_device(), weight.shape, weight.stride()),
        *((None, None, None) if bias is None else (bias.dtype, bias.get_device(), bias.shape)),
        *((None, None, None) if other is None else (other.dtype, other.get_device(), other.shape)),
    )
    runner = RUNNERS.known.get(key)
    if runner is None:
        runner = _runner(x, weight, bias, other, relu, geometry, engine)
        RUNNERS.known[key] = runner
    return runner


def _runner(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    relu: bool,
    geometry: Geometry,
    engine: str,
) -> Runner:
    layout = memory_layout(x, weight)

    def fallback(x: Tensor, w: Tensor, b: Tensor | None, z: Tensor | None) -> Tensor:
        return as_laid_out(aten_conv(x, w, b, z, relu, geometry), layout)

    if not x.is_cuda or engine == ATEN:
        return fallback
    try:
        problem = problem_of(x, weight, bias is not None, other is not None, relu, geometry)
        check_operands(problem, x, weight, bias, other)
    except SteadyError as error:
        called = f"fprop of {(tuple(x.shape), tuple(weight.shape))}, {x.dtype},"
        note_miss(called, engine, one_line(error), _FITTING)
        return fallback
    return planned(problem, engine, x.device, fallback)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    relu: bool,
    engine: str,
    dgrad: str,
    wgrad: str,
) -> Tensor:
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    spatial = [(size + 2 * pad - gap * (k - 1) - 1) // s + 1 for size, k, s, pad, gap in sizes]
    shape = (x.shape[0], weight.shape[0], *spatial)
    return empty(shape, x.dtype, x.device, memory_layout(x, weight))


def _grad_impl(
    first: Tensor,
    second: Tensor,
    input: list[int],
    weight: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    operation: Any,
    layout: Any,
    engine: str,
) -> Tensor:
    key = (
        *(operation, layout, engine, groups, number_of(first.dtype), first.dtype, first.device),
        *(tuple(input), tuple(weight), tuple(stride), tuple(padding), tuple(dilation)),
    )
    runner = RUNNERS.known.get(key)
    if runner is None:
        shapes = (tuple(input), tuple(weight))
        geometry = (tuple(stride), tuple(padding), tuple(dilation), groups)
        runner = grad_runner(first, shapes, geometry, operation, layout, engine)
        RUNNERS.known[key] = runner
    return runner(first, second, None, None)


def grad_runner(
    first: Tensor,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    geometry: Geometry,
    operation: Operation,
    layout: Layout,
    engine: str,
) -> Runner:
    """Make the runner of a gradient: the engine, or PyTorch if the engine cannot compute it."""

    def fallback(a: Tensor, b: Tensor, *unused: Tensor | None) -> Tensor:
        return as_laid_out(aten_conv_grad(a, b, shapes, geometry, operation, layout), layout)

    if not first.is_cuda or engine == ATEN:
        return fallback
    try:
        number = number_of(first.dtype)
        if number is None:
            raise UnsupportedError(f"no engines for {first.dtype}")
        sizes: Any = (*shapes, *geometry)
        problem = ConvProblem(operation, "none", number, layout, *sizes)
    except SteadyError as error:
        note_miss(f"{operation} of {shapes}, {first.dtype},", engine, one_line(error), _FITTING)
        return fallback
    return planned(problem, engine, first.device, fallback)


def _grad_fake(
    first: Tensor,
    second: Tensor,
    input: list[int],
    weight: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    operation: str,
    layout: Any,
    engine: str,
) -> Tensor:
    shape = tuple(input if operation == "dgrad" else weight)
    return empty(shape, first.dtype, first.device, layout)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, other, stride, padding, dilation, groups, relu, _, dgrad, wgrad = inputs
    ctx.save_for_backward(x, weight, output if relu else None)
    ctx.geometry, ctx.number = (stride, padding, dilation, groups), number_of(x.dtype)
    ctx.engines, ctx.biased, ctx.added = (dgrad, wgrad), bias is not None, other is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, grad, torch.ops.steadytorch.conv_engine_grad)


def _gradients(ctx: Any, grad: Tensor, run: Callable[..., Tensor]) -> tuple[Any, ...]:
    x, weight, output = ctx.saved_tensors
    if output is not None:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    needs = ctx.needs_input_grad
    db = grad.sum([0, *range(2, grad.dim())]) if ctx.biased and needs[2] else None
    dz = grad if ctx.added and needs[3] else None
    # The TF32 setting may have changed since the forward pass, and engines for TF32 are not valid
    # for float32.
    same = number_of(x.dtype) == ctx.number
    dgrad, wgrad = ctx.engines if same else (ATEN, ATEN)
    stride, padding, dilation, groups = ctx.geometry
    # All three passes use the layout of the forward pass, as in PyTorch.
    layout, shapes = memory_layout(x, weight), (list(x.shape), list(weight.shape))
    grad = as_laid_out(grad, layout)
    dx = dw = None
    own = [needs[0] and dgrad == ATEN, needs[1] and wgrad == ATEN, False]
    if any(own):
        dx, dw, _ = torch.ops.aten.convolution_backward(
            *(grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups),
            own,
        )
    if needs[0] and not own[0]:
        dx = run(grad, weight, *shapes, *ctx.geometry, "dgrad", layout, dgrad)
    if needs[1] and not own[1]:
        dw = run(x, grad, *shapes, *ctx.geometry, "wgrad", layout, wgrad)
    return dx, dw, db, dz, *([None] * 8)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, input, weight, *geometry, operation, layout, _ = inputs
    ctx.save_for_backward(first, second)
    ctx.shapes, ctx.geometry = (input, weight), geometry
    ctx.operation, ctx.layout = operation, layout


def _grad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute second-order gradients by PyTorch's operators; dgrad and wgrad are bilinear."""
    first, second = ctx.saved_tensors
    needs, operands = ctx.needs_input_grad, (ctx.shapes, ctx.geometry)
    one = two = None
    if ctx.operation == "dgrad":
        one = aten_conv(grad, second, None, None, False, ctx.geometry) if needs[0] else None
        two = aten_conv_grad(grad, first, *operands, "wgrad", ctx.layout) if needs[1] else None
    else:
        one = aten_conv_grad(second, grad, *operands, "dgrad", ctx.layout) if needs[0] else None
        two = aten_conv(first, grad, None, None, False, ctx.geometry) if needs[1] else None
    return one, two, *([None] * 9)


_LIBRARY.impl("conv_engine", _impl, "CompositeExplicitAutograd")
_LIBRARY.impl("conv_engine_grad", _grad_impl, "CompositeExplicitAutograd")
torch.library.register_fake("steadytorch::conv_engine", _fake, lib=_LIBRARY)
torch.library.register_fake("steadytorch::conv_engine_grad", _grad_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "steadytorch::conv_engine", _backward, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "steadytorch::conv_engine_grad", _grad_backward, setup_context=_setup_grad_context, lib=_LIBRARY
)

conv_engine: Any = torch.ops.steadytorch.conv_engine


class _Directly(torch.autograd.Function):
    """Runs `conv_engine` without the dispatcher, which takes over half of its host time."""

    # No separate `setup_context`: PyTorch would inspect the signature of `forward` at each call.
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        output = _impl(*given)
        _setup_context(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        recorded = torch.is_grad_enabled()
        return _gradients(
            ctx, grads[0], torch.ops.steadytorch.conv_engine_grad if recorded else _grad_impl
        )


def observed(x: Tensor, weight: Tensor) -> bool:
    """Whether a call of `conv_engine` must go through PyTorch's dispatcher.

    The result is True under a compiler, dispatch mode, `torch.func` transform or profiler, and for
    tensor subclasses.
    """
    return bool(
        torch.compiler.is_compiling()
        or not (type(x) in _PLAIN and type(weight) in _PLAIN)
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or _profiler_enabled()
    )


def conv_engine_eagerly(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Call `conv_engine`, bypassing the dispatcher unless the call is `observed`.

    Args:
        x: the input.
        weight: the weight.
        rest: the other arguments of the operator.
    """
    if observed(x, weight):
        return conv_engine(x, weight, *rest)
    return (_Directly.apply if torch.is_grad_enabled() else _impl)(x, weight, *rest)
