"""Tiling and launch of matrix products: pointwise convolutions and Linears."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from steadytorch.kernels.launch import Launch

TYPES = (torch.float16, torch.bfloat16)
"""Supported dtypes. float32 is left to PyTorch, because TF32 is the user's choice."""
CORES = 132
"""SMs of an H200; the default without a GPU."""
VECTOR = 8
"""16-bit elements in the widest load."""
MOST_ROWS, MOST_DEPTH = 128, 128
TALL, WIDE = 64, 128
"""Rows that four warps pass to tensor cores at once; columns of the widest block."""


class PointwiseTile(NamedTuple):
    """Tile of one program.

    Attributes:
        rows: pixels or rows.
        columns: outputs.
        depth: channels per iteration.
        warps: warps of 32 threads.
        stages: pipeline stages; all but one prefetch.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(rows: int, outputs: int, channels: int, cores: int) -> PointwiseTile:
    """Choose the tile of a matrix product of these sizes on a device with `cores` SMs.

    Batches of images are bound by reading pixels. A program therefore computes up to 128 output
    channels from one read of at least 64 rows, as Hopper's tensor cores take at once. The next
    programs compute further output channels of the same rows, which are then in L2. The width of a
    large tile, 128 or 64 channels, is chosen for less padding: 320 channels are five times 64. A
    thread holds at most 64 sums, so that several programs fit on an SM. With few channels there is
    nothing to prefetch, and concurrent programs hide each other's latency instead.

    Single images fit in L2 and are bound by the busiest SM, so tiles shrink until each SM has a
    tile. Small tiles are latency-bound: they process 128 channels at a time and prefetch further
    ahead.

    Each program sums over all channels in a fixed order, so results are bitwise reproducible.
    """
    wide = max(16, _power_of_two(outputs))
    if wide > WIDE:
        wide = min((WIDE, WIDE // 2), key=lambda columns: -outputs % columns)
    low = min(wide, 32)
    shapes = [
        *([(MOST_ROWS, wide, 2 * cores)] if wide < WIDE else []),
        *((TALL, wide, cores), (32, min(wide, 64), cores), (32, low, cores), (16, low, cores)),
    ]
    height, width = 16, 16
    for high, across, wanted in shapes:
        if _blocks(rows, high) * _blocks(outputs, across) >= wanted and high < 2 * rows:
            height, width = high, across
            break
    small = height < TALL
    depth = min(max(16, _power_of_two(channels)), MOST_DEPTH if small else 64)
    # No more stages than blocks to prefetch: their buffers reduce occupancy. With a single stage,
    # loads would pass through registers.
    stages = min(_blocks(channels, depth) + 1, 6 if small else 3)
    return PointwiseTile(height, width, depth, 2 if height * width <= 16 * 32 else 4, stages)


def _power_of_two(count: int) -> int:
    """Smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def launch_for(
    sizes: tuple[int, int, int],
    pixels: int,
    activation: str,
    is_biased: bool,
    is_gated: bool,
    is_added: bool,
    device: torch.device,
) -> Launch:
    """Prepare a launch of the kernel `pointwise_conv` for products of one shape.

    Args:
        sizes: rows, outputs and channels.
        pixels: number of rows that share a gate.
        activation: a key of `ACTIVATIONS`.
        is_biased: whether a bias is added.
        is_gated: whether there is a gate.
        is_added: whether there is a residual.
        device: device of the tensors.
    """
    from steadytorch.kernels import separable_programs

    rows, outputs, channels = sizes
    tile = tile_for(rows, outputs, channels, _cores(device))
    gate = ""
    if is_gated:
        gate = "one" if rows == pixels or pixels % tile.rows == 0 else "each"
    steps = gcd(outputs, VECTOR), gcd(channels, VECTOR)
    counts = (rows, outputs // steps[0], channels // steps[1], pixels)
    kind = (activation, is_biased, gate, is_added, *steps)
    block = (channels % tile.depth == 0, tile.rows, tile.columns, tile.depth)
    return Launch(
        separable_programs.pointwise_conv,
        (_blocks(rows, tile.rows) * _blocks(outputs, tile.columns), 1, 1),
        (*counts, *kind, *block),
        device,
        tile.warps,
        {"num_stages": tile.stages},
    )


def is_within_reach(rows: int, outputs: int, channels: int) -> bool:
    """Whether all element offsets, including those of masked loads, fit in 32 bits."""
    most = max(rows, outputs) + MOST_ROWS
    return most * max(channels, outputs) + MOST_DEPTH < 2**31


def _cores(device: torch.device) -> int:
    if device.type != "cuda":
        return CORES
    return torch.cuda.get_device_properties(device).multi_processor_count
