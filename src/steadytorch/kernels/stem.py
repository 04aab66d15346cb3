"""Layout and tiling of a stem (convolution, ReLU, max-pooling) for one launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.launch import ALIGNMENT, is_channels_last, is_launchable

Pair = tuple[int, int]

MOST_CHANNELS = 4
"""Maximum channels of the input. Above this, library kernels win."""
WINDOW, STEP = 3, 2
"""Pooling window and stride, on both axes. Processing columns and lines in pairs relies on them."""
SHORTEST_PRODUCT = 16
"""Minimum depth of a tensor core product, in elements."""
SHARED_BYTES = 48 << 10
"""Shared memory of a program that every device grants; the default if it is unknown."""
CORES = 132
"""SMs of an H200; the default without a GPU."""


class Config(NamedTuple):
    """Tile sizes and launch options of one program; the fastest choice depends on the sizes.

    Attributes:
        pairs: pairs of columns of the convolution.
        channels: channels of the result.
        strip: lines of the result.
        warps: warps of 32 threads.
        stages: pipeline stages between memory and tensor cores; 1 for no pipelining.
        registers: maximum registers of a thread; fewer registers allow more programs per SM.
    """

    pairs: int
    channels: int
    strip: int
    warps: int
    stages: int
    registers: int

    @property
    def name(self) -> str:
        """Name used in plans."""
        return f"{self.pairs}x{self.channels}x{self.strip}-w{self.warps}s{self.stages}"


CONFIGS: dict[str, Config] = {
    config.name: config
    for config in (
        Config(64, 64, 14, 4, 1, 255),
        Config(64, 32, 14, 4, 2, 168),
        Config(64, 32, 2, 4, 1, 168),
        Config(64, 32, 7, 4, 2, 168),
        Config(64, 32, 1, 4, 1, 168),
        Config(64, 32, 14, 4, 1, 168),
        Config(64, 32, 7, 4, 1, 168),
        Config(64, 64, 7, 8, 1, 255),
    )
}
"""All configurations that a plan may name, by name.

The most promising on an H200 come first, since a search may run out of time."""


class StemGeometry(NamedTuple):
    """Sizes that are compile-time constants of the kernel: all except the number of images.

    Attributes:
        height: input height, like `width`.
        planes: input channels in separate planes; 1 for channels_last.
        inner: contiguous input channels; 1 if not channels_last.
        outputs: channels of the result.
        kernel_w: width of the convolution kernel.
        taps: lines of the convolution kernel, times `planes`.
        apart: input lines from one line of the convolution to the next, times `planes`.
        out_inner: contiguous channels of the result; 1 if not channels_last.
        per_output: stride of the weight, like `per_channel`, `per_row` and `per_column`.
        lead: elements read before a line of taps, to align wide loads.
        wide: elements read for a line of taps of two columns.
        precision: Triton's input precision of products.
        biased: whether a bias is added.
        pairs: see `Config`, like `channels` and `strip`; 0 until `cut_up`.
    """

    height: int
    width: int
    planes: int
    inner: int
    outputs: int
    kernel_w: int
    taps: int
    apart: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    conv_height: int
    conv_width: int
    pool_padding: int
    out_height: int
    out_width: int
    out_inner: int
    per_output: int
    per_channel: int
    per_row: int
    per_column: int
    lead: int
    wide: int
    precision: str
    biased: bool
    pairs: int = 0
    channels: int = 0
    strip: int = 0

    def cut_up(self, config: Config) -> StemGeometry:
        """Return a copy with the tile sizes of a configuration."""
        return self._replace(pairs=config.pairs, channels=config.channels, strip=config.strip)

    def columns(self, batch: int) -> int:
        """Number of column pairs in `batch` images; without pooling padding, one more per image."""
        return batch * (self.out_width + 1 - self.pool_padding)

    def grid(self, batch: int) -> tuple[int, int, int]:
        """Number of programs along pairs, strips and channels; neighbours overlap by one pair."""
        pairs = -(-self.columns(batch) // (self.pairs - 1))
        return pairs, -(-self.out_height // self.strip), -(-self.outputs // self.channels)


def geometry_of(
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    pool_padding: int,
    ceil_mode: bool,
    precision: str,
    biased: bool,
) -> StemGeometry | None:
    """Compute the sizes of a stem, before tiling.

    Args:
        x: tensor with the sizes, strides and dtype of the input, on any device.
        weight: tensor with the sizes and strides of the weight, on any device.
        stride: stride of the convolution.
        padding: padding of the convolution.
        pool_padding: padding of the pooling on both axes, 0 or 1.
        ceil_mode: `ceil_mode` of the pooling.
        precision: Triton's input precision of products.
        biased: whether a bias is added.

    Returns:
        The sizes; None if the kernel does not support them or PyTorch rejects them.
    """
    placed = layouts(x, weight)
    sizes = _sizes(x, weight, stride, padding, pool_padding, ceil_mode)
    if placed is None or sizes is None:
        return None
    is_last, becomes_last = placed
    _, channels, height, width = x.shape
    outputs, _, kernel_h, kernel_w = weight.shape
    per_output, per_channel, per_row, per_column = weight.stride()
    planes, inner = (1, channels) if is_last else (channels, 1)
    step = 2 * stride[1] * inner
    vector = min(step & -step, ALIGNMENT // x.element_size())
    lead = ((1 - pool_padding) * stride[1] - padding[1]) * inner % vector
    wide = max(SHORTEST_PRODUCT, lead + (kernel_w + stride[1]) * inner)
    return StemGeometry(
        height=height,
        width=width,
        planes=planes,
        inner=inner,
        outputs=outputs,
        kernel_w=kernel_w,
        taps=kernel_h * planes,
        apart=stride[0] * planes,
        stride_h=stride[0],
        stride_w=stride[1],
        padding_h=padding[0],
        padding_w=padding[1],
        conv_height=sizes[0],
        conv_width=sizes[1],
        pool_padding=pool_padding,
        out_height=sizes[2],
        out_width=sizes[3],
        out_inner=outputs if becomes_last else 1,
        per_output=per_output,
        per_channel=per_channel,
        per_row=per_row,
        per_column=per_column,
        lead=lead,
        wide=1 << (wide - 1).bit_length(),
        precision=precision,
        biased=biased,
    )


def layouts(x: Tensor, weight: Tensor) -> tuple[bool, bool] | None:
    """Whether the input and PyTorch's result are channels_last; None for unsupported layouts."""
    is_last, becomes_last = is_channels_last(x), [_goes_last(x), _goes_last(weight)]
    return None if is_last is None or None in becomes_last else (is_last, any(becomes_last))


def _goes_last(tensor: Tensor) -> bool | None:
    """Whether PyTorch treats a tensor as channels_last; None if the strides match neither layout.

    With one channel or one pixel, a tensor is both contiguous and channels_last; its exact strides
    then decide.
    """
    is_last = is_channels_last(tensor)
    if is_last or not tensor.is_contiguous(memory_format=torch.channels_last):
        return is_last
    first, last = (
        torch.empty(tensor.shape, device="meta", memory_format=order).stride()
        for order in (torch.contiguous_format, torch.channels_last)
    )
    return {last: True, first: False}.get(tensor.stride())


def _sizes(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, pool_padding: int, ceil_mode: bool
) -> tuple[int, int, int, int] | None:
    """Height and width of the convolution and of the result; None if PyTorch rejects the sizes."""
    small = torch.empty((1, x.shape[1], *x.shape[2:]), device="meta")
    kernel = torch.empty((1, *weight.shape[1:]), device="meta")
    pooling: Any = (WINDOW, STEP, pool_padding, 1, ceil_mode)
    try:
        conv = F.conv2d(small, kernel, None, stride, padding)
        pooled = F.max_pool2d(conv, *pooling)
    except RuntimeError:  # the eager call raises PyTorch's own error
        return None
    height, width = pooled.shape[2:]
    result = torch.empty((x.shape[0], weight.shape[0], height, width), dtype=x.dtype, device="meta")
    if not is_launchable(result, x.dtype):
        return None
    return conv.shape[2], conv.shape[3], height, width


def config_for(
    name: str, geometry: StemGeometry, batch: int, dtype: torch.dtype, device: torch.device
) -> Config | None:
    """Look up a configuration by name; "" chooses one from the sizes.

    Args:
        name: a key of `CONFIGS`, or "".
        geometry: sizes of the stem.
        batch: number of images.
        dtype: dtype of the tensors.
        device: device of the tensors.

    Returns:
        The configuration; None if it needs more shared memory than the device has.
    """
    memory, _ = resources_of(device)
    named = [CONFIGS[name]] if name else CONFIGS.values()
    fitting = [config for config in named if shared_bytes(geometry, config, dtype) <= memory]
    # The first one that occupies the most SMs.
    return max(fitting, key=lambda c: busy_cores(geometry.cut_up(c), batch, device), default=None)


def busy_cores(geometry: StemGeometry, batch: int, device: torch.device) -> int:
    """Number of SMs that one launch of the stem occupies."""
    return min(math.prod(geometry.grid(batch)), resources_of(device)[1])


def shared_bytes(geometry: StemGeometry, config: Config, dtype: torch.dtype) -> int:
    """Upper bound of the shared memory of a program, in bytes.

    Shared memory holds the weights for both columns of a pair, the pixels of each pipeline stage,
    and a buffer for exchanging result lines.
    """
    g = geometry
    lines = 1 if config.stages == 1 else config.stages * (g.taps + g.apart)
    elements = g.taps * g.wide * 2 * config.channels + lines * g.wide * config.pairs
    return elements * dtype.itemsize + 8 * config.pairs * config.channels


def resources_of(device: torch.device) -> tuple[int, int]:
    """Shared memory available to one program, in bytes, and number of SMs."""
    if device.type != "cuda":
        return 1 << 30, CORES
    properties: Any = torch.cuda.get_device_properties(device)
    memory = getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)
    return memory, properties.multi_processor_count
