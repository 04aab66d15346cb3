"""Fused depthwise convolution with bias and activation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.depthwise_tile import CORES, DepthwiseGeometry, Pair, tile_for
from steadytorch.kernels.launch import (
    Launch,
    is_channels_last,
    is_launchable,
)
from steadytorch.kernels.operators import FusedOperator, pairs

MOST_TAPS = 49
"""Maximum taps of a kernel. All taps are unrolled, so more would take too long to compile."""
MOST_PATHS = 10_000
"""Maximum of (pixels in the input window of a patch) x taps, which bounds compile time.

Pixels are unrolled too, and the compiler tracks each one to its products. Examples:

    square kernels without dilation     at most 8,379 (7x7, stride 2)
    7x7, dilation 2                     12,544: compiles in 27 s
    3x3, dilation 36                    49,284: compiles in 30 s
"""


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    activation: str = "",
) -> Tensor:
    """Compute `activation(conv2d(x, weight, bias, stride, padding, dilation, groups=C))`.

    On CUDA, a single fused kernel handles 16-bit types in channels_last. The kernel rounds once;
    PyTorch rounds after each step. Unless the weight has the layout of `channels_innermost`, each
    call copies it.

    Args:
        x: shape (N, C, H, W).
        weight: shape (C, 1, kernel height, kernel width).
        bias: shape (C,), or None.
        stride: one number or (vertical, horizontal), like the next two.
        padding: zeros added on each side.
        dilation: distance between kernel taps.
        activation: a key of `ACTIVATIONS`.

    Raises:
        KeyError: unknown activation.
        RuntimeError: PyTorch's operators reject the arguments.
    """
    sizes = pairs(stride, padding, dilation)
    return OPERATOR(depthwise_conv2d, x, weight, bias, *sizes, activation)


def channels_innermost(weight: Tensor) -> Tensor:
    """Copy a weight of shape (C, 1, height, width) to the layout that the kernel reads.

    Neighbouring threads process neighbouring channels. In PyTorch's layout the taps of one channel
    are adjacent, so loading one tap for each channel would touch one cache line per thread.
    """
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def _eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
) -> Tensor:
    function = ACTIVATIONS[activation]
    sizes = (list(stride), list(padding), list(dilation))
    return function(F.conv2d(x, weight, bias, *sizes, groups=_channels(x)))


def _channels(x: Tensor) -> int:
    """Channels of (N, C, H, W) or (C, H, W); 1 for other shapes, which conv2d rejects."""
    return x.shape[-3] if x.dim() > 2 else 1


def program_for(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
) -> PreparedDepthwiseConv | None:
    """Return the launcher for this call, or None to use PyTorch's operators.

    Takes the arguments of `depthwise_conv2d`, with sizes as (vertical, horizontal) pairs.
    """
    others = (weight,) if bias is None else (weight, bias)
    if any(t.device != x.device for t in others):
        return None
    if bias is not None and not (bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return None
    like = (x.shape, is_channels_last(x), weight.shape, weight.stride())
    sizes: Any = (tuple(stride), tuple(padding), tuple(dilation))
    return prepared(*like, bias is not None, x.dtype, x.device, *sizes, activation)


class PreparedDepthwiseConv:
    """Prepared launch for inputs of one shape, type and layout.

    Args:
        images: number of images.
        geometry: all other sizes.
        warps: warps per program.
        is_innermost: whether the weight is in the layout of `channels_innermost`.
        device: device of the tensors.

    Attributes:
        geometry: as given, like `warps`.
    """

    def __init__(
        self,
        images: int,
        geometry: DepthwiseGeometry,
        warps: int,
        is_innermost: bool,
        device: torch.device,
    ) -> None:
        from steadytorch.kernels import separable_programs

        g = self.geometry = geometry
        self.warps = warps
        patches = images * -(-g.out_height // g.rows) * -(-g.out_width // g.columns)
        grid = (-(-patches // g.patches) * -(-g.all_channels // g.channels), 1, 1)
        self._shape = (images, g.all_channels, g.out_height, g.out_width)
        self._is_innermost = is_innermost
        program = separable_programs.depthwise_conv
        self._launch = Launch(program, grid, (images, g), device, warps)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Launch the kernel and return its result in channels_last."""
        if not self._is_innermost:
            weight = channels_innermost(weight)
        layout = torch.channels_last
        y = torch.empty(self._shape, dtype=x.dtype, device=x.device, memory_format=layout)
        self._launch(x, weight, weight if bias is None else bias, y)
        return y


@lru_cache(maxsize=1024)
def prepared(
    shape: torch.Size,
    is_last: bool | None,
    kernel: torch.Size,
    kernel_strides: tuple[int, ...],
    is_biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    activation: str,
) -> PreparedDepthwiseConv | None:
    """Return the launcher for these inputs, or None to use PyTorch's operators."""
    if not is_last or dtype not in (torch.float16, torch.bfloat16):
        return None
    if len(kernel) != 4 or kernel[:2] != (shape[1], 1) or kernel[2:].numel() > MOST_TAPS:
        return None
    if activation not in ACTIVATIONS or not len(stride) == len(padding) == len(dilation) == 2:
        return None
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        return None
    weight = torch.empty_strided(kernel, kernel_strides, dtype=dtype, device="meta")
    x = torch.empty(shape, dtype=dtype, device="meta")
    try:
        y = F.conv2d(x, weight, None, stride, padding, dilation, shape[1])
    except RuntimeError:  # the eager call raises PyTorch's own error
        return None
    if not is_launchable(y, dtype) or y.shape[2:].numel() == 1:
        return None  # for one output pixel, PyTorch's strides depend on its backend
    outputs, taps = (y.shape[2], y.shape[3]), (kernel[2], kernel[3])
    cores = CORES
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tile_for(shape, outputs, taps, stride, dilation, cores)
    window = (*taps, *stride, *padding, *dilation)
    clipped = any(padding) or any(
        (-(-out // patch) * patch - 1) * step + (k - 1) * gap >= size
        for size, out, patch, k, step, gap in zip(
            shape[2:], outputs, tile[:2], taps, stride, dilation, strict=True
        )
    )
    values: Any = (*shape[1:], *outputs, *window, is_biased, activation, clipped, *tile[:4])
    geometry = DepthwiseGeometry._make(values)
    if geometry.seen_rows * geometry.seen_columns * kernel[2:].numel() > MOST_PATHS:
        return None
    is_innermost = weight.permute(2, 3, 1, 0).is_contiguous()
    return PreparedDepthwiseConv(shape[0], geometry, tile.warps, is_innermost, device)


OPERATOR = FusedOperator(
    "depthwise_conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation, str activation) -> Tensor",
    program_for,
    _eager,
)
