"""Fused convolution, bias and activation for few input channels, as in a network's first layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.launch import Launch, is_launchable
from steadytorch.kernels.operators import FusedOperator, pairs
from steadytorch.kernels.stem import CORES, MOST_CHANNELS, SHORTEST_PRODUCT, Pair, layouts

MOST_TAPS = 256
"""Maximum taps of a kernel over all channels. All are unrolled, so more take long to compile."""
MOST_OUTPUTS = 128
"""Maximum outputs. Above this, the convolution is compute-bound and library kernels win."""
MOST_DEPTH = 32
"""Maximum taps that a thread holds at once."""


def thin_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    activation: str = "",
) -> Tensor:
    """Compute `activation(conv2d(x, weight, bias, stride, padding, dilation))`.

    On CUDA, a single fused kernel handles 16-bit types and up to four input channels. The kernel
    accumulates in float32 and rounds once; PyTorch rounds after each step.

    Args:
        x: shape (N, C, H, W).
        weight: shape (K, C, kernel height, kernel width).
        bias: shape (K,), or None.
        stride: one number or (vertical, horizontal), like the next two.
        padding: zeros added on each side.
        dilation: distance between kernel taps.
        activation: a key of `ACTIVATIONS`.

    Raises:
        KeyError: unknown activation.
        RuntimeError: PyTorch's operators reject the arguments.
    """
    sizes = pairs(stride, padding, dilation)
    return OPERATOR(thin_conv2d, x, weight, bias, *sizes, activation)


def is_thin(kernel: Sequence[int]) -> bool:
    """Whether the kernel supports a weight of shape (K, C, height, width).

    Kernels of size 1x1 belong to `pointwise_conv2d`. A single output channel is not supported,
    because its strides cannot distinguish contiguous from channels_last.
    """
    if len(kernel) != 4 or not 1 < kernel[0] <= MOST_OUTPUTS or kernel[1] > MOST_CHANNELS:
        return False
    return prod(kernel[2:]) > 1 and 0 < prod(kernel[1:]) <= MOST_TAPS


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
    return function(F.conv2d(x, weight, bias, list(stride), list(padding), list(dilation)))


def program_for(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
) -> PreparedSmallChannelConv | None:
    """Return the launcher for this call, or None to use PyTorch's operators.

    Takes the arguments of `thin_conv2d`, with sizes as (vertical, horizontal) pairs.
    """
    others = (weight,) if bias is None else (weight, bias)
    if any(t.device != x.device for t in others):
        return None
    if bias is not None and not (bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return None
    like = (x.shape, x.stride(), weight.shape, weight.stride())
    sizes: Any = (tuple(stride), tuple(padding), tuple(dilation))
    return prepared(*like, bias is not None, x.dtype, x.device, *sizes, activation)


class SmallChannelTile(NamedTuple):
    """Tile of a program: `rows` pixels (one per thread) by `columns` outputs, `depth` taps deep."""

    rows: int
    columns: int
    depth: int


def tile_for(pixels: int, outputs: int, taps: int, cores: int) -> SmallChannelTile:
    """Choose the tile of a convolution of these sizes on a device with `cores` SMs.

    Tile width: loading 27 taps costs a thread about as many instructions as 12 outputs with SiLU,
    at 13 instructions each. More than 64 outputs per program would need too many registers. A layer
    with 96 outputs therefore uses three blocks of 32: no padding, although pixels are loaded three
    times.

    Tile height: four warps pass 128 pixels to Hopper's tensor cores in two steps. With 128 pixels
    per program, one 112x112 image gives only 98 programs for 132 SMs. Smaller inputs therefore use
    fewer pixels per program, down to one warp's 32, until there are two programs per SM.
    """
    columns = min((64, 32, 16), key=lambda wide: -(-outputs // wide) * (wide + 12))
    blocks = -(-outputs // columns)
    fitting = (rows for rows in (128, 64) if -(-pixels // rows) * blocks >= 2 * cores)
    depth = SHORTEST_PRODUCT if taps <= SHORTEST_PRODUCT else MOST_DEPTH
    return SmallChannelTile(next(fitting, 32), columns, depth)


class SmallChannelGeometry(NamedTuple):
    """Sizes that are compile-time constants of the kernel: all except the number of images.

    Attributes:
        height: input height, like `width`.
        x_channel: elements from one channel of the input to the next.
        x_column: elements from one pixel of the input to the next.
        w_output: stride of the weight, like `w_channel`, `w_row` and `w_column`.
        out_last: whether the result is channels_last.
        biased: whether a bias is added.
        activation: a key of `ACTIVATIONS`.
        rows: see `SmallChannelTile`, like `columns` and `depth`.
    """

    channels: int
    height: int
    width: int
    outputs: int
    out_height: int
    out_width: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    dilation_h: int
    dilation_w: int
    x_channel: int
    x_column: int
    w_output: int
    w_channel: int
    w_row: int
    w_column: int
    out_last: bool
    biased: bool
    activation: str
    rows: int
    columns: int
    depth: int


class PreparedSmallChannelConv:
    """Prepared launch for inputs of one shape, type and layout.

    Args:
        images: number of images.
        geometry: all other sizes.
        device: device of the tensors.

    Attributes:
        geometry: as given.
        warps: warps per program.
    """

    def __init__(self, images: int, geometry: SmallChannelGeometry, device: torch.device) -> None:
        from steadytorch.kernels import separable_programs

        g = self.geometry = geometry
        self.warps = g.rows // 32
        programs = -(-images * g.out_height * g.out_width // g.rows) * -(-g.outputs // g.columns)
        self._shape = (images, g.outputs, g.out_height, g.out_width)
        self._layout = torch.channels_last if g.out_last else torch.contiguous_format
        program = separable_programs.thin_conv
        self._launch = Launch(program, (programs, 1, 1), (images, g), device, self.warps)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Launch the kernel and return its result; tensors must have the prepared shapes."""
        y = torch.empty(self._shape, dtype=x.dtype, device=x.device, memory_format=self._layout)
        self._launch(x, weight, weight if bias is None else bias, y)
        return y


@lru_cache(maxsize=1024)
def prepared(
    shape: torch.Size,
    strides: tuple[int, ...],
    kernel: torch.Size,
    kernel_strides: tuple[int, ...],
    is_biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    activation: str,
) -> PreparedSmallChannelConv | None:
    """Return the launcher for these inputs, or None to use PyTorch's operators."""
    if dtype not in (torch.float16, torch.bfloat16) or activation not in ACTIVATIONS:
        return None
    if len(shape) != 4 or not is_thin(kernel) or shape[1] != kernel[1]:
        return None
    if not len(stride) == len(padding) == len(dilation) == 2:
        return None
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        return None
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    weight = torch.empty_strided(kernel, kernel_strides, dtype=dtype, device="meta")
    try:
        y = F.conv2d(x, weight, None, stride, padding, dilation)
    except RuntimeError:  # the eager call raises PyTorch's own error
        return None
    # For one pixel, PyTorch's strides depend on its backend.
    if not is_launchable(y, dtype) or 1 in (shape[2:].numel(), y.shape[2:].numel()):
        return None
    placed = layouts(x, weight)
    if placed is None:
        return None
    is_last, becomes_last = placed
    cores = CORES
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tile_for(y.shape[0] * y.shape[2:].numel(), kernel[0], kernel[1:].numel(), cores)
    steps = (1, shape[1]) if is_last else (shape[2:].numel(), 1)
    window = (*y.shape[1:], *kernel[2:], *stride, *padding, *dilation)
    places = (*steps, *kernel_strides, becomes_last)
    values: Any = (*shape[1:], *window, *places, is_biased, activation, *tile)
    return PreparedSmallChannelConv(shape[0], SmallChannelGeometry._make(values), device)


OPERATOR = FusedOperator(
    "thin_conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation, str activation) -> Tensor",
    program_for,
    _eager,
)
