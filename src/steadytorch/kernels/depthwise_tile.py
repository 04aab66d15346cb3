"""How a depthwise convolution is cut up into programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]

CORES = 132
"""Of an H200, for where there is no device to ask."""
PATCHES = ((1, 1), (1, 2), (2, 2), (2, 4), (2, 7), (4, 4), (4, 7))
"""Rows and columns. Sides of what networks compute are multiples of seven more often than not."""
MOST_VALUES = 54
"""That a thread holds for each of its two channels: sums, pixels of a line, taps still needed.
About 128 registers, with which four warps run on each quarter of a core."""
WASTE = 8
"""Maximum share of padding channels in a tile: 1/WASTE."""


class Tile(NamedTuple):
    """What a program computes.

    Attributes:
        rows: of a patch of the result, whose sums one thread keeps for each of its channels.
        columns: of a patch.
        patches: side by side, then line by line, then image by image.
        channels: of each patch.
        warps: of 32 threads. `patches` times `channels` are two for each thread.
    """

    rows: int
    columns: int
    patches: int
    channels: int
    warps: int


class Geometry(NamedTuple):
    """What is compiled into a program: all but how many images there are.

    Distances between pixels so become part of the instructions that load them, which otherwise
    would compute three numbers for each load.

    Attributes:
        all_channels: of the tensors.
        height: of the input, like `width`.
        biased: whether there is a bias.
        activation: a name out of `ACTIVATIONS`.
        clipped: whether some patch sees pixels that the input has not.
        rows: see `Tile`, like all that follow.
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
        """Lines of the input from the first to the last that a patch sees."""
        return (self.rows - 1) * self.stride_h + (self.kernel_h - 1) * self.dilation_h + 1

    @property
    def seen_columns(self) -> int:
        """Pixels of a line from the first to the last that a patch sees."""
        return (self.columns - 1) * self.stride_w + (self.kernel_w - 1) * self.dilation_w + 1


def tile_for(
    shape: Sequence[int], outputs: Pair, kernel: Pair, stride: Pair, dilation: Pair, cores: int
) -> Tile:
    """The tile for a convolution, of `shape` (N, C, H, W), on a device of so many cores.

    A load costs a thread five instructions: the comparison with the edges, the zero in place of
    what is not there, the load, and one conversion for each of two channels. A large patch uses
    each pixel for many outputs: one of 4x4 with a kernel of 5x5 loads 64 pixels for 400 products,
    one of 1x1 25 for 25. So threads take two channels only, and what registers there are holds
    sums. A warp's loads are one line of the cache all the same, of 64 channels, four bytes wide;
    wider ones would be fewer, but each channel of a thread costs the registers of a patch.

    A large patch also leaves few programs: of one image of 7x7, less than the device has cores.
    What is minimized is the number of instructions that the busiest quarter of a core issues, which
    with a single warp it does every other cycle at best; of equals the smaller patch is taken.
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
    # Neighbours in one program share what they see, by the core's own cache; spread first.
    side_by_side = next((n for n in (4, 2) if warps // n >= 2 * cores), 1)
    return Tile(rows, columns, 64 * side_by_side // channels, channels, side_by_side)


def _channels_of_tile(count: int) -> int:
    """The most of which few are computed in vain."""
    for channels in (64, 32):
        if -(-count // channels) * channels * WASTE <= count * (WASTE + 1):
            return channels
    return 16


def _instructions(patch: Pair, kernel: Pair, stride: Pair, dilation: Pair) -> Pair:
    """About how many a warp issues for a patch, and how many values a thread holds a channel.

    As counted in what was compiled for a GPU of compute capability 9.0.
    """
    seen = [
        len({o * step + tap * gap for o in range(out) for tap in range(taps)})
        for out, taps, step, gap in zip(patch, kernel, stride, dilation, strict=True)
    ]
    outputs, taps = patch[0] * patch[1], kernel[0] * kernel[1]
    issued = 60 + 5 * seen[0] * seen[1] + 4 * taps + 2 * outputs * taps + 14 * outputs
    lines = min(kernel[0], (patch[0] - 1) * stride[0] // dilation[0] + 1)
    return issued, outputs + seen[1] + lines * kernel[1]
