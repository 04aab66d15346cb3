"""How a product of matrices, pixels or rows by channels, is cut up and launched.

Such is a convolution of single pixels, and such is a Linear.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from steadytorch.kernels.launch import Launch

TYPES = (torch.float16, torch.bfloat16)
"""float32 is PyTorch's: whether it may round to TF32 is not for a kernel to say."""
CORES = 132
"""Of an H200; what is reckoned with where there is no GPU."""
VECTOR = 8
"""Elements of 16 bits in the widest load."""
MOST_ROWS, MOST_DEPTH = 128, 128
TALL, WIDE = 64, 128
"""Rows that four warps give to tensor cores at once; columns of the widest block."""


class Cut(NamedTuple):
    """How a product is cut up: of a program, `rows` (pixels) by `columns` (outputs).

    It takes `depth` channels at a time, in `stages` of which all but one read ahead, and has
    `warps` of 32 threads.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def cut_for(rows: int, outputs: int, channels: int, cores: int) -> Cut:
    """How to cut up a product of these sizes on a device with so many cores.

    Of a batch, time goes by the pixels read. As many outputs as possible, up to 128, share one
    read, of 64 rows or more, which is what Hopper's tensor cores take at once; more outputs make
    blocks that follow each other and find the pixels in the L2 cache. Between 128 and 64 outputs
    the choice is what leaves fewer of them empty: 320 are five blocks of 64. A block holds no more
    than 64 sums a thread, so that a core has room for several programs: those of few channels have
    no later block to read ahead, and hide each other's waiting instead.

    Of a single image, all tensors are in the L2 cache, and time goes by how long one core works, so
    that blocks shrink until each core has one. Every program walks all channels, in an order that
    nothing changes, for the same bits each time. Small blocks take 128 channels at a time and read
    further ahead: what they wait for is latency.
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
    # No more than there is to read ahead: room set aside for it is room for fewer programs. With
    # one stage even the first block would take registers on its way, and room as well.
    stages = min(_blocks(channels, depth) + 1, 6 if small else 3)
    return Cut(height, width, depth, 2 if height * width <= 16 * 32 else 4, stages)


def _power_of_two(count: int) -> int:
    """The least that is not below."""
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
    """The program `pointwise_conv` for products of one shape, to be called with its tensors.

    Args:
        sizes: rows, outputs and channels.
        pixels: how many rows share a gate.
        activation: by name.
        is_biased: whether there is a bias.
        is_gated: whether there is a gate.
        is_added: whether there is a residual.
        device: where the tensors are.
    """
    from steadytorch.kernels import separable_programs

    rows, outputs, channels = sizes
    cut = cut_for(rows, outputs, channels, _cores(device))
    gate = ""
    if is_gated:
        gate = "one" if rows == pixels or pixels % cut.rows == 0 else "each"
    steps = gcd(outputs, VECTOR), gcd(channels, VECTOR)
    counts = (rows, outputs // steps[0], channels // steps[1], pixels)
    kind = (activation, is_biased, gate, is_added, *steps)
    block = (channels % cut.depth == 0, cut.rows, cut.columns, cut.depth)
    return Launch(
        separable_programs.pointwise_conv,
        (_blocks(rows, cut.rows) * _blocks(outputs, cut.columns), 1, 1),
        (*counts, *kind, *block),
        device,
        cut.warps,
        {"num_stages": cut.stages},
    )


def is_within_reach(rows: int, outputs: int, channels: int) -> bool:
    """Whether 32 bits hold all offsets, those that masks leave out included."""
    most = max(rows, outputs) + MOST_ROWS
    return most * max(channels, outputs) + MOST_DEPTH < 2**31


def _cores(device: torch.device) -> int:
    if device.type != "cuda":
        return CORES
    return torch.cuda.get_device_properties(device).multi_processor_count
