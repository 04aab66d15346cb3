"""Tiling of depthwise convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]

CORES = 132
"""SMs of an H200; the default without a GPU."""
PATCHES = ((1, 1), (1, 2), (2, 2), (2, 4), (2, 7), (4, 4), (4, 7))
"""Patch sizes (rows, columns). Feature maps often have sides that are multiples of seven."""
MOST_VALUES = 54
"""Maximum number of values that a thread holds for each of its two channels: sums, pixels of a
line, and taps still needed. This takes about 128 registers, which lets four warps run on each
quarter of an SM."""
WASTE = 8
"""Maximum share of padding channels in a tile: 1/WASTE."""


class DepthwiseTile(NamedTuple):
    """Part of the output that one program computes.

    Attributes:
        rows: rows of an output patch; one thread keeps the sums of a patch for two channels.
        columns: columns of a patch.
        patches: patches per tile, numbered along a line, then over lines, then over images.
        channels: channels per tile.
        warps: warps of 32 threads; `patches * channels` is two per thread.
    """

    rows: int
    columns: int
    patches: int
    channels: int
    warps: int


class DepthwiseGeometry(NamedTuple):
    """Sizes that are compile-time constants of the kernel: all except the number of images.

    Constant strides become immediate offsets of load instructions, which saves three address
    computations per load.

    Attributes:
        all_channels: channels of the tensors.
        height: input height, like `width`.
        biased: whether a bias is added.
        activation: a key of `ACTIVATIONS`.
        clipped: whether a patch's input window extends beyond the input.
        rows: see `DepthwiseTile`, like the fields after it.
    """

    all_channels: int
    height: int
    width: int
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
    biased: bool
    activation: str
    clipped: bool
    rows: int
    columns: int
    patches: int
    channels: int

    @property
    def seen_rows(self) -> int:
        """Height of a patch's input window."""
        return (self.rows - 1) * self.stride_h + (self.kernel_h - 1) * self.dilation_h + 1

    @property
    def seen_columns(self) -> int:
        """Width of a patch's input window."""
        return (self.columns - 1) * self.stride_w + (self.kernel_w - 1) * self.dilation_w + 1


def tile_for(
    shape: Sequence[int], outputs: Pair, kernel: Pair, stride: Pair, dilation: Pair, cores: int
) -> DepthwiseTile:
    """Choose the tile of a convolution over `shape` (N, C, H, W) on a device with `cores` SMs.

    Loading a pixel takes five instructions: the bounds check, the zero fill, the load, and a
    conversion for each of two channels. A larger output patch reuses each input pixel for more
    outputs. With a 5x5 kernel, a 4x4 patch loads 64 pixels for 400 products; a 1x1 patch loads 25
    pixels for 25 products. Each thread therefore takes only two channels and spends its registers
    on the sums of a larger patch. A warp still reads a full cache line: 64 channels, or 4 bytes per
    thread. Wider loads would need fewer instructions, but each additional channel per thread needs
    registers for a whole patch.

    A larger patch also means fewer programs: a single 7x7 image may have fewer programs than the
    device has SMs. The chosen patch minimises the instructions issued by the busiest quarter of an
    SM. A single warp issues an instruction at most every other cycle. On a tie, the smaller patch
    wins.
    """
    channels = _channels_of_tile(shape[1])
    blocks = -(-shape[1] // channels)
    best = None
    for rows, columns in PATCHES:
        across, down = -(-outputs[1] // columns), -(-outputs[0] // rows)
        count = shape[0] * down * across
        issued, held = _instructions((rows, columns), kernel, stride, dilation)
        warps = -(-count * blocks * channels // 64)
        cost = issued * max(2, -(-warps // (4 * cores)))
        if best is None or (held <= MOST_VALUES and cost < best[0]):
            best = (cost, rows, columns, warps)
    assert best is not None
    _, rows, columns, warps = best
    # Neighbouring patches in one program share input through the L1 cache, but occupying all SMs
    # comes first.
    side_by_side = next((n for n in (4, 2) if warps // n >= 2 * cores), 1)
    return DepthwiseTile(rows, columns, 64 * side_by_side // channels, channels, side_by_side)


def _channels_of_tile(count: int) -> int:
    """Largest tile width, 64 or 32 channels, that pads channels by at most 1/WASTE; else 16."""
    for channels in (64, 32):
        if -(-count // channels) * channels * WASTE <= count * (WASTE + 1):
            return channels
    return 16


def _instructions(patch: Pair, kernel: Pair, stride: Pair, dilation: Pair) -> Pair:
    """Estimate the instructions a warp issues per patch, and the values a thread holds per channel.

    The coefficients are instruction counts of code compiled for compute capability 9.0.
    """
    seen = [
        len({o * step + tap * gap for o in range(out) for tap in range(taps)})
        for out, taps, step, gap in zip(patch, kernel, stride, dilation, strict=True)
    ]
    outputs, taps = patch[0] * patch[1], kernel[0] * kernel[1]
    issued = 60 + 5 * seen[0] * seen[1] + 4 * taps + 2 * outputs * taps + 14 * outputs
    lines = min(kernel[0], (patch[0] - 1) * stride[0] // dilation[0] + 1)
    return issued, outputs + seen[1] + lines * kernel[1]
