"""Fused pointwise (1x1) convolution with gate, bias, activation and residual.

A pointwise convolution is a matrix product. In most networks a pointwise convolution is
memory-bound or, for a single image, launch-bound, rather than compute-bound.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.operators import FusedOperator
from steadytorch.kernels.pointwise_tile import TYPES, is_within_reach, launch_for


def pointwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    gate: Tensor | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """Compute `activation(conv2d(x * gate, weight, bias)) + other`, on CUDA in one kernel.

    The fused kernel rounds `x * gate` as PyTorch does, then accumulates in float32 and rounds once;
    PyTorch rounds after each step.

    Args:
        x: shape (N, C, H, W).
        weight: shape (K, C, 1, 1).
        bias: shape (K,), or None.
        activation: a key of `ACTIVATIONS`; "" for none.
        gate: squeeze-and-excitation scale, shape (N, C, 1, 1), or None.
        other: residual added after the activation, shape (N, K, H, W), or None.

    Raises:
        KeyError: unknown activation.
        RuntimeError: PyTorch's operators reject the arguments.
    """
    return OPERATOR(pointwise_conv2d, x, weight, bias, activation, gate, other)


def _eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    other: Tensor | None,
) -> Tensor:
    y = ACTIVATIONS[activation](F.conv2d(x if gate is None else x * gate, weight, bias))
    return y if other is None else y + other


def program_for(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    other: Tensor | None,
) -> PreparedPointwiseConv | None:
    """Return the launcher for these tensors on any device, or None if unsupported."""
    device = x.device
    for tensor in (weight, bias, gate, other):
        if tensor is not None and tensor.device != device:
            return None
    if not ((bias is None or bias.is_contiguous()) and (gate is None or gate.is_contiguous())):
        return None
    return prepared(
        (x.shape, x.stride()),
        (weight.shape, weight.stride()),
        None if bias is None else bias.shape,
        activation,
        None if gate is None else gate.shape,
        None if other is None else (other.shape, other.stride()),
        x.dtype,
        device,
    )


class PreparedPointwiseConv:
    """Prepared launch for inputs of one shape, type and layout.

    Args:
        shape: shape of the result, (N, K, H, W).
        strides: strides of the result.
        channels: input channels C.
        activation: a key of `ACTIVATIONS`.
        is_biased: whether a bias is added.
        is_gated: whether there is a gate.
        is_added: whether there is a residual.
        device: device of the tensors.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        channels: int,
        activation: str,
        is_biased: bool,
        is_gated: bool,
        is_added: bool,
        device: torch.device,
    ) -> None:
        batch, outputs, height, width = shape
        pixels = height * width
        sizes = (batch * pixels, outputs, channels)
        kind = (activation, is_biased, is_gated, is_added)
        self._shape, self._strides = shape, strides
        self._launch = launch_for(sizes, pixels, *kind, device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        other: Tensor | None,
    ) -> Tensor:
        """Launch the kernel and return its result; tensors must have the prepared shapes."""
        y = torch.empty_strided(self._shape, self._strides, dtype=x.dtype, device=x.device)
        bias, gate, other = (x if t is None else t for t in (bias, gate, other))
        self._launch(x, weight, bias, gate, other, y)
        return y


Place = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides."""


@lru_cache(maxsize=1024)
def prepared(
    x: Place,
    weight: Place,
    bias: torch.Size | None,
    activation: str,
    gate: torch.Size | None,
    other: Place | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PreparedPointwiseConv | None:
    """Return the launcher for these inputs, or None to use PyTorch's operators."""
    shape, kernel = x[0], weight[0]
    if dtype not in TYPES or activation not in ACTIVATIONS or len(shape) != 4:
        return None
    if len(kernel) != 4 or tuple(kernel[1:]) != (shape[1], 1, 1):
        return None
    batch, channels, height, width = shape
    # With one channel, both layouts have the same memory order, and the strides are ambiguous.
    if min(channels, kernel[0]) < 2:
        return None
    full = (batch, kernel[0], height, width)
    if bias not in (None, kernel[:1]) or gate not in (None, (batch, channels, 1, 1)):
        return None
    if not is_within_reach(batch * height * width, kernel[0], channels):
        return None
    strides = _strides(x, weight, activation, gate is not None, other)
    if strides is None or (other and other[0] != full):
        return None
    has = (bias is not None, gate is not None, other is not None)
    return PreparedPointwiseConv(full, strides, channels, activation, *has, device)


def _strides(
    x: Place, weight: Place, activation: str, is_gated: bool, other: Place | None
) -> tuple[int, ...] | None:
    """Strides that PyTorch gives the result; None if the kernel does not support these layouts.

    For 1x1 images, contiguous and channels_last have the same memory order; only the strides of
    size-1 axes differ. PyTorch's convolution returns channels_last if its input or weight is
    channels_last. Elementwise operators on 1x1 images return contiguous strides, except ReLU6,
    which is left to PyTorch.
    """
    (batch, _, height, width), outputs = x[0], weight[0][0]
    y_orders = _orders((batch, outputs, height, width))
    orders = (_orders(x[0]), _orders(weight[0]), y_orders)
    places = (x[1], weight[1], y_orders[1] if other is None else other[1])
    if any(own not in both for own, both in zip(places, orders, strict=True)):
        return None
    is_last = [own == both[1] for own, both in zip(places, orders, strict=True)]
    if height * width > 1:
        return y_orders[1] if is_last[0] and is_last[2] else None
    if activation == "relu6":
        return None
    stays = not activation and other is None
    return y_orders[stays and (is_last[1] or (is_last[0] and not is_gated))]


def _orders(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contiguous and channels_last strides of a shape."""
    _, channels, height, width = shape
    image = channels * height * width
    return (image, height * width, width, 1), (image, 1, channels * width, channels)


OPERATOR = FusedOperator(
    "pointwise_conv2d(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? gate, "
    "Tensor? other) -> Tensor",
    program_for,
    _eager,
)
