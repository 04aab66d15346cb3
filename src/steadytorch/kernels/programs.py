"""The programs, in Triton; the one file of this room that imports it.

Each computes in float32, into which every type it takes converts exactly. `tl.maximum` with
`PropagateNan.ALL` is NaN where either operand is, as PyTorch's ReLU and pooling are, and takes +0.0
as larger than -0.0.
"""

# ruff: noqa: N803 - constants of a program are written in capitals, as Triton's users know them

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tap(best, x, wanted, plane, line, at, channel, height, width, inner, CLIPPED: tl.constexpr):
    """One tap of the window for all outputs of a block."""
    if CLIPPED:
        wanted = wanted & (line >= 0) & (line < height) & (at >= 0) & (at < width)
    value = tl.load(x + ((plane * height + line) * width + at) * inner + channel, wanted, other=0.0)
    return _larger(best, value)


@triton.jit
def _two_taps(best, x, wanted, plane, line, at, height, width):
    """Both taps of a line of the window, for all outputs: `at` runs over all pixels of a line."""
    wanted = wanted & (line >= 0) & (line < height) & (at < width)
    value = tl.load(x + (plane * height + line) * width + at, wanted, other=0.0)
    left, right = tl.split(tl.reshape(value, (best.shape[0], best.shape[1], 2)))
    return _larger(_larger(best, left), right)


@triton.jit
def relu_max_pool(
    x,
    y,
    rows,
    columns,
    height,
    width,
    out_height,
    out_width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    READ: tl.constexpr,
    CLIPPED: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes the outputs as rows of what is contiguous: channels if READ is "last", else pixels.

    Starting from zero makes the maximum over a window the ReLU's as well. READ "pairs" is for
    windows that are two pixels wide and stand side by side: one load of all pixels serves both
    taps, where a load of every second pixel uses half of what it fetches.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    wanted = (row < rows) & (column < columns)
    if READ == "last":
        line = row // out_width
        left = (row % out_width) * STRIDE_W - PADDING_W
        channel = column
        inner = columns
    else:
        line = row
        left = column * STRIDE_W - PADDING_W
        channel = 0
        inner = 1
    plane = line // out_height
    top = (line % out_height) * STRIDE_H - PADDING_H
    best = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if READ == "pairs":
        both = tl.program_id(1) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)[None, :]
        for i in tl.static_range(KERNEL_H):
            tap = top + i * DILATION_H
            best = _two_taps(best, x, row < rows, plane, tap, both, height, width)
    elif UNROLLED:
        for i in tl.static_range(KERNEL_H):
            for j in tl.static_range(KERNEL_W):
                best = _tap(
                    best, x, wanted, plane, top + i * DILATION_H, left + j * DILATION_W, channel,
                    height, width, inner, CLIPPED,
                )  # fmt: skip
    else:
        for i in range(KERNEL_H):
            for j in range(KERNEL_W):
                best = _tap(
                    best, x, wanted, plane, top + i * DILATION_H, left + j * DILATION_W, channel,
                    height, width, inner, CLIPPED,
                )  # fmt: skip
    tl.store(y + row * columns + column, best.to(y.dtype.element_ty), wanted)


@triton.jit
def bias_add_relu(
    x,
    other,
    bias,
    y,
    count,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the bias first, as PyTorch would, and rounds once, at the end.

    CHANNELS and INNER, the elements between one channel and the next, are constants because a
    division by a variable for each element would cost more than the memory traffic.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = at < count
    total = tl.load(x + at, wanted, other=0.0).to(tl.float32)
    if BIASED:
        channel = at // INNER % CHANNELS
        total += tl.load(bias + channel, wanted, other=0.0).to(tl.float32)
    total += tl.load(other + at, wanted, other=0.0).to(tl.float32)
    total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + at, total.to(y.dtype.element_ty), wanted)
