"""Convolutions and their gradients by PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from steadytorch.conv.executables import Geometry, empty
from steadytorch.conv.problem import Layout, Operation


def aten_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    relu: bool,
    geometry: Geometry,
) -> Tensor:
    """Compute a convolution, and optionally add and ReLU, by PyTorch's own operators."""
    stride, padding, dilation, groups = geometry
    zeros = [0] * len(stride)
    y = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, zeros, groups)
    if other is not None:
        y = y + other
    return y.relu() if relu else y


def aten_conv_grad(
    first: Tensor,
    second: Tensor,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    geometry: Geometry,
    operation: Operation,
    layout: Layout,
) -> Tensor:
    """Compute a gradient by PyTorch: `first, second` are (dy, weight) for dgrad, (x, dy) for wgrad.

    PyTorch takes the gradient's layout from the operand that is differentiated, but reads none of
    the operand's values. An uninitialised dense tensor stands in for the operand that is
    differentiated.
    """
    stride, padding, dilation, groups = geometry
    by_input = operation == "dgrad"
    grad = first if by_input else second
    missing = empty(shapes[0 if by_input else 1], grad.dtype, grad.device, layout)
    x, weight = (missing, second) if by_input else (first, missing)
    found = torch.ops.aten.convolution_backward(
        *(grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups),
        [by_input, not by_input, False],
    )
    return found[0] if by_input else found[1]
