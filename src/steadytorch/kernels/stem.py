"""How the work of a stem (convolution, ReLU, max-pooling) is laid out and cut up for one launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.launch import ALIGNMENT, is_channels_last, is_launchable

Pair = tuple[int, int]

MOST_CHANNELS = 4
"""Channels of the input. Above this many, library kernels win."""
WINDOW, STEP = 3, 2
"""Of the pooling, either way: the program's columns and lines come in pairs for these."""
SHORTEST_PRODUCT = 16
"""Elements along which tensor cores multiply and add at the least."""
SHARED_BYTES = 48 << 10
"""Memory on the chip that every device grants a program, for where it does not say."""
CORES = 132
"""Of an H200, for where there is no device to ask."""


class Config(NamedTuple):
    """How the work is cut up; which way is fastest depends on the sizes.

    Attributes:
        pairs: of columns of the convolution, for each program.
        channels: of the result, for each program.
        strip: lines of the result, for each program.
        warps: of 32 threads, for each program.
        stages: of the pipeline between memory and tensor cores; 1 for none.
        registers: of a thread at the most: with fewer, more programs run side by side.
    """

    pairs: int
    channels: int
    strip: int
    warps: int
    stages: int
    registers: int

    @property
    def name(self) -> str:
        """By which plans refer to it."""
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
"""The closed list that the configuration of a plan is from, by name: the most promising first, as
far as an H200 has shown, since a search may not come to the last."""


class Geometry(NamedTuple):
    """The sizes that are compiled into a program: all but how many images there are.

    Attributes:
        height: of the input, like `width`.
        planes: channels of the input that lie apart.
        inner: channels of the input that lie side by side.
        outputs: channels of the result.
        kernel_w: pixels of a line of the kernel.
        taps: lines of the kernel, of all planes.
        apart: lines of the input, of all planes, from a line of the convolution to the next.
        out_inner: channels of the result that lie side by side, or 1.
        per_output: stride of the weight, like all of `per_channel`, `per_row` and `per_column`.
        lead: elements read before a line of taps, to begin where wide loads may.
        wide: elements read for a line of taps, of two columns.
        precision: of products, as Triton names it.
        biased: whether there is a bias.
        pairs: see `Config`, like `channels` and `strip`; 0 where not cut up yet.
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

    def cut_up(self, config: Config) -> Geometry:
        """The same for a configuration."""
        return self._replace(pairs=config.pairs, channels=config.channels, strip=config.strip)

    def columns(self, batch: int) -> int:
        """Pairs of columns of so many images, those left of an unpadded window included."""
        return batch * (self.out_width + 1 - self.pool_padding)

    def grid(self, batch: int) -> tuple[int, int, int]:
        """Programs: for pairs, of which one is the left neighbour of others; strips; channels."""
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
) -> Geometry | None:
    """The sizes of a stem as a program takes them, not cut up yet.

    Args:
        x: like the input, on any device: its sizes, strides and type count.
        weight: of the convolution, likewise.
        stride: of the convolution.
        padding: of the convolution.
        pool_padding: 0 or 1, either way.
        ceil_mode: of the pooling.
        precision: of products, as Triton names it.
        biased: whether there is a bias.

    Returns:
        None for what the program does not take, or PyTorch refuses.
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
    return Geometry(
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
    """Whether channels lie innermost, of the input and of PyTorch's result; None for other ways."""
    is_last, becomes_last = is_channels_last(x), [_goes_last(x), _goes_last(weight)]
    return None if is_last is None or None in becomes_last else (is_last, any(becomes_last))


def _goes_last(tensor: Tensor) -> bool | None:
    """Whether PyTorch takes channels to lie innermost, by the strides where sizes leave it open.

    So they do for one channel and for one pixel. None where strides are of neither order.
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
    """Height and width of the convolution and of the result, by PyTorch's own rules."""
    small = torch.empty((1, x.shape[1], *x.shape[2:]), device="meta")
    kernel = torch.empty((1, *weight.shape[1:]), device="meta")
    pooling: Any = (WINDOW, STEP, pool_padding, 1, ceil_mode)
    try:
        conv = F.conv2d(small, kernel, None, stride, padding)
        pooled = F.max_pool2d(conv, *pooling)
    except RuntimeError:  # PyTorch refuses: so it shall, in its own words
        return None
    height, width = pooled.shape[2:]
    result = torch.empty((x.shape[0], weight.shape[0], height, width), dtype=x.dtype, device="meta")
    if not is_launchable(result, x.dtype):
        return None
    return conv.shape[2], conv.shape[3], height, width


def config_for(
    name: str, geometry: Geometry, batch: int, dtype: torch.dtype, device: torch.device
) -> Config | None:
    """The configuration of this name; for "" one that follows from the sizes.

    Args:
        name: out of `CONFIGS`, or "".
        geometry: of the stem.
        batch: images.
        dtype: of the tensors.
        device: where it is to run.

    Returns:
        None where a program of that kind needs more memory on the chip than the device has.
    """
    memory, _ = _resources(device)
    named = [CONFIGS[name]] if name else CONFIGS.values()
    fitting = [config for config in named if shared_bytes(geometry, config, dtype) <= memory]
    # The first of those that leave no core idle, or the one that leaves the fewest.
    return max(fitting, key=lambda c: busy_cores(geometry.cut_up(c), batch, device), default=None)


def busy_cores(geometry: Geometry, batch: int, device: torch.device) -> int:
    """Number of SMs this launch occupies."""
    return min(math.prod(geometry.grid(batch)), _resources(device)[1])


def shared_bytes(geometry: Geometry, config: Config, dtype: torch.dtype) -> int:
    """What a program needs of the memory on the chip, at the most.

    All weights of its channels for two columns each, pixels of a line of taps for each stage, and
    room to exchange a line of the result between threads.
    """
    g = geometry
    lines = 1 if config.stages == 1 else config.stages * (g.taps + g.apart)
    elements = g.taps * g.wide * 2 * config.channels + lines * g.wide * config.pairs
    return elements * dtype.itemsize + 8 * config.pairs * config.channels


def _resources(device: torch.device) -> tuple[int, int]:
    """Memory on the chip for one program, in bytes, and cores."""
    if device.type != "cuda":
        return 1 << 30, CORES
    properties: Any = torch.cuda.get_device_properties(device)
    memory = getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)
    return memory, properties.multi_processor_count
