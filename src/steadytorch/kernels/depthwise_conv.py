"""A convolution of each channel by itself, with bias and activation, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.depthwise_tile import CORES, Geometry, Pair, tile_for
from steadytorch.kernels.launch import (
    Launch,
    is_channels_last,
    is_covered,
    is_launchable,
    route,
    traced,
)
from steadytorch.kernels.operators import recomputed, registered

MOST_TAPS = 49
"""Of a kernel: all are unrolled, and more take long to compile."""
MOST_PATHS = 10_000
"""Pixels that a patch sees, from the first to the last, times taps: pixels are unrolled as well,
and the compiler walks from each to what it is multiplied by. Without dilation squares have 8,379 at
the most (7x7, stride 2). Of 7x7 dilated by 2 there are 12,544, which take 27 s to compile; of 3x3
dilated by 36 49,284, which take 30 s."""


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    activation: str = "",
) -> Tensor:
    """`activation(conv2d(x, weight, bias, stride, padding, dilation, groups=C))`.

    On CUDA in one pass for 16-bit types in channels_last. There it rounds once, where PyTorch
    rounds after each step. A weight whose channels do not lie innermost is copied at each call;
    see `channels_innermost`.

    Args:
        x: shape (N, C, H, W).
        weight: shape (C, 1, kernel height, kernel width).
        bias: shape (C,), or None for none.
        stride: of the convolution; like all that follow, one number or (vertical, horizontal).
        padding: zeros on each side.
        dilation: distance between taps.
        activation: a name out of `ACTIVATIONS`.

    Raises:
        KeyError: no activation has this name.
        RuntimeError: whatever PyTorch's own operators refuse.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if has_torch_function(tensors):
        given = (x, weight, bias, stride, padding, dilation, activation)
        return handle_torch_function(depthwise_conv2d, tensors, *given)
    sizes: Any = [(g, g) if isinstance(g, int) else g for g in (stride, padding, dilation)]
    # Autocast chooses the type of PyTorch's convolution, and knows no other.
    cast = torch.is_autocast_enabled("cuda")
    run: Any = _eager if cast else route(_impl, _OPERATOR, _eager, *tensors)
    return run(x, weight, bias, *sizes, activation)


def channels_innermost(weight: Tensor) -> Tensor:
    """The same weight, (C, 1, height, width), in the one layout that the program reads.

    Neighbours among the threads take neighbours among the channels: with the taps of a channel side
    by side, as in PyTorch, each tap would be fetched from as many lines of the cache as threads.
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
    """Of (N, C, H, W) or (C, H, W); 1 where the convolution is refused for its shape."""
    return x.shape[-3] if x.dim() > 2 else 1


def _impl(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    activation: str,
) -> Tensor:
    given = (x, weight, bias, stride, padding, dilation, activation)
    fused = program_for(*given)
    return _eager(*given) if fused is None else fused(x, weight, bias)


def program_for(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
) -> Fused | None:
    """The program that such a call runs, or None where PyTorch's own operators run.

    Args are those of `depthwise_conv2d`, sizes as pairs.
    """
    others = (weight,) if bias is None else (weight, bias)
    if not is_covered(x, *others) or any(t.device != x.device for t in others):
        return None
    if bias is not None and not (bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return None
    like = (x.shape, is_channels_last(x), weight.shape, weight.stride())
    sizes: Any = (tuple(stride), tuple(padding), tuple(dilation))
    return _fused(*like, bias is not None, x.dtype, x.device, *sizes, activation)


class Fused:
    """The program, made up for inputs of one shape, type and layout.

    Args:
        images: how many there are.
        geometry: all other sizes.
        warps: of a program.
        is_innermost: whether the channels of the weight are.
        device: where the tensors are.

    Attributes:
        geometry: as given, like `warps`.
    """

    def __init__(
        self, images: int, geometry: Geometry, warps: int, is_innermost: bool, device: torch.device
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
        """The result, in channels_last; the tensors must be as described."""
        if not self._is_innermost:
            weight = channels_innermost(weight)
        layout = torch.channels_last
        y = torch.empty(self._shape, dtype=x.dtype, device=x.device, memory_format=layout)
        self._launch(x, weight, weight if bias is None else bias, y)
        return y


@lru_cache(maxsize=1024)
def _fused(
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
) -> Fused | None:
    """The program for such inputs, or None where PyTorch's own operators are to run."""
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
    except RuntimeError:  # PyTorch refuses: so it shall, in its own words
        return None
    if not is_launchable(y, dtype) or y.shape[2:].numel() == 1:
        return None  # of one pixel, what strides PyTorch gives depends on who computes
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
    geometry = Geometry._make(values)
    if geometry.seen_rows * geometry.seen_columns * kernel[2:].numel() > MOST_PATHS:
        return None
    is_innermost = weight.permute(2, 3, 1, 0).is_contiguous()
    return Fused(shape[0], geometry, tile.warps, is_innermost, device)


_OPERATOR = registered(
    "depthwise_conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation, str activation) -> Tensor",
    _impl,
    traced(program_for, _eager),
    recomputed(_eager),
)
