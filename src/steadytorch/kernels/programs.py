"""Triton kernels for ReLU, pooling and network stems.

All kernels compute in float32, to which every supported type converts exactly. `tl.maximum` with
`PropagateNan.ALL` returns NaN if either operand is NaN, like PyTorch's ReLU and pooling, and treats
+0.0 as larger than -0.0.
"""

# ruff: noqa: N803 - by Triton's convention, compile-time constants are in capitals

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tap(best, x, wanted, plane, line, at, channel, height, width, inner, CLIPPED: tl.constexpr):
    """Update the maxima of a block with one tap of the pooling window."""
    if CLIPPED:
        wanted = wanted & (line >= 0) & (line < height) & (at >= 0) & (at < width)
    value = tl.load(x + ((plane * height + line) * width + at) * inner + channel, wanted, other=0.0)
    return _larger(best, value)


@triton.jit
def _two_taps(best, x, wanted, plane, line, at, height, width):
    """Update the maxima of a block with both taps of one line of each pooling window."""
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
    """ReLU and max-pooling; a block covers rows of contiguous outputs.

    Contiguous outputs are channels if READ is "last", otherwise pixels of a line. The maximum
    starts from zero, which applies the ReLU. READ "pairs" is for adjacent windows of width 2: one
    contiguous load serves both taps of a line. For windows of width 2, a load with stride 2 would
    use only half of the data it fetches.
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
    """Compute relu(x + bias + other): add the bias first, as PyTorch does; round once at the end.

    CHANNELS and INNER (elements from one channel to the next) are constants: dividing by a variable
    for each element would cost more than the memory traffic.
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


@triton.jit
def _maximum(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _to_tf32(value):
    """Round to nearest TF32; tensor cores would truncate."""
    bits = value.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(value == value, near, value)


@triton.jit
def _weights(weight, number, channel, G: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the weights of one kernel line, (taps, outputs); zero where an output has no tap."""
    output = tl.arange(0, COLUMNS * G.channels)[:, None]
    # The taps of the second column are shifted by `stride_w` pixels.
    own = tl.arange(0, G.wide)[None, :] - G.lead - output // G.channels * (G.stride_w * G.inner)
    channel += output % G.channels
    at = channel * G.per_output + number % G.planes * G.per_channel + number // G.planes * G.per_row
    at += own % G.inner * G.per_channel + own // G.inner * G.per_column
    has = (channel < G.outputs) & (own >= 0) & (own < G.kernel_w * G.inner)
    taps = tl.load(weight + at, has, other=0.0)
    if G.precision == "tf32":
        taps = _to_tf32(taps)
    return tl.trans(taps)


@triton.jit
def _pixels(x, at, within, line, number, G: tl.constexpr):
    """Load the pixels under one kernel line for one output line; shape (pairs, taps)."""
    row = line * G.stride_h - G.padding_h + number // G.planes
    start = (number % G.planes * G.height + row) * (G.width * G.inner)
    value = tl.load(x + start + at, within & (row >= 0) & (row < G.height), other=0.0)
    if G.precision == "tf32":
        value = _to_tf32(value)
    return value


@triton.jit
def _two_lines(x, weights, at, within, line, valid, G: tl.constexpr, UPPER: tl.constexpr):
    """Compute two lines of the convolution, (pairs, outputs) each; -inf outside of its result.

    The two lines share most of their input. Unless UPPER is set, only the lower line is computed.
    Both columns of a pair read the same pixels; a column has zero weights for pixels that only the
    other column needs. A zero weight times a non-finite pixel gives NaN.
    """
    # A sum that starts at minus infinity stays there: cheaper than a select at the end.
    upper_valid = valid & (line >= 0) & (line < G.conv_height)
    upper = tl.where(upper_valid, 0.0, -float("inf"))
    lower_valid = valid & (line + 1 >= 0) & (line + 1 < G.conv_height)
    lower = tl.where(lower_valid, 0.0, -float("inf"))
    for number in tl.static_range(tl.constexpr(G.taps + G.apart)):
        if UPPER or number >= G.apart:
            value = _pixels(x, at, within, line, number, G)
            if UPPER and number < G.taps:
                upper = tl.dot(value, weights[number], upper, G.precision)
            if number >= G.apart:
                lower = tl.dot(value, weights[number - G.apart], lower, G.precision)
    return upper, lower


@triton.jit
def _largest_of_column(x, weight, at, within, top, valid, channel, G: tl.constexpr):
    """Compute the maximum over three lines for one column of each pair; (pairs, channels).

    The column multiplies only the pixels that it needs, which avoids the spurious NaN of
    `_two_lines`.
    """
    own = tl.arange(0, G.wide)[None, :] - G.lead
    within = within & (own >= 0) & (own < G.kernel_w * G.inner)
    best = tl.full((G.pairs, G.channels), -float("inf"), tl.float32)
    for below in range(3):
        line = top + below
        total = tl.full((G.pairs, G.channels), 0.0, tl.float32)
        for number in range(G.taps):
            taps = _weights(weight, number, channel, G, 1)
            value = _pixels(x, at, within, line, number, G)
            total = tl.dot(value, taps, total, G.precision)
        exists = valid[:, None] & (line >= 0) & (line < G.conv_height)
        best = _maximum(best, tl.where(exists, total, -float("inf")))
    return best


@triton.jit
def _exists(pair, column, G: tl.constexpr):
    """Whether column 0 or 1 of a pair lies within the convolution's result."""
    column += 2 * pair + 1 - G.pool_padding
    return (column >= 0) & (column < G.conv_width)


@triton.jit
def _store_line(y, first, second, bias, pair, target, stored, row, G: tl.constexpr):
    """Pool over three columns, store a line of the result, and return which pairs hold NaN."""
    own = _maximum(_maximum(first, second) + bias, 0.0)
    if 2 * G.out_width - 1 - G.pool_padding >= G.conv_width:
        # Both columns of the last pair may lie outside: -inf plus an infinite bias would be NaN.
        own = tl.where(_exists(pair, 0, G)[:, None], own, 0.0)
    right = _maximum(second + bias, 0.0).to(y.dtype.element_ty)
    left = tl.broadcast_to(tl.maximum(tl.arange(0, G.pairs) - 1, 0)[:, None], right.shape)
    left = tl.where(pair[:, None] == G.pool_padding - 1, 0.0, tl.gather(right, left, 0))
    result = _maximum(own.to(y.dtype.element_ty), left)
    at = target + row * G.out_width * G.out_inner
    stored &= row < G.out_height
    if G.out_inner == 1:
        tl.store(y + tl.trans(at), tl.trans(result), tl.trans(stored))
    else:
        tl.store(y + at, result, stored)
    return tl.max((own != own).to(tl.int32), 1)


@triton.jit
def conv_relu_max_pool(x, weight, bias, y, columns, G: tl.constexpr):
    """Convolution, ReLU and 3x3 max-pooling with stride 2; a program walks down a strip of lines.

    Columns of the convolution are processed in pairs, one pair per column of the result, numbered
    over all images. For each kernel line, a pair reads one contiguous run of pixels, which is a row
    of a matrix product and serves both columns. The third column of a pooling window is the second
    column of the pair on its left. The third line of a pooling window is the lower line of the
    previous step. Only a program's first pair and a strip's first line are computed solely because
    pooling windows overlap.
    """
    lane = tl.arange(0, G.pairs)
    place = tl.program_id(0) * (G.pairs - 1) - 1 + lane
    wanted = (lane > 0) & (place < columns)
    place = tl.minimum(tl.maximum(place, 0), columns - 1)
    each = G.out_width + 1 - G.pool_padding
    image = place // each
    pair = place % each - (1 - G.pool_padding)
    channel = tl.program_id(2) * G.channels
    channels = channel + tl.arange(0, G.channels)[None, :]
    added = tl.full((1, G.channels), 0.0, tl.float32)
    if G.biased:
        added = tl.load(bias + channels, channels < G.outputs, other=0.0).to(tl.float32)
    size = G.out_height * G.out_width
    if G.out_inner == 1:
        target = (image[:, None] * G.outputs + channels) * size + pair[:, None]
    else:
        target = (image[:, None] * size + pair[:, None]) * G.outputs + channels
    stored = wanted[:, None] & (pair[:, None] >= 0) & (channels < G.outputs)

    left = pair * (2 * G.stride_w * G.inner)
    left += ((1 - G.pool_padding) * G.stride_w - G.padding_w) * G.inner - G.lead
    image *= G.planes * G.inner * G.height * G.width
    at = left[:, None] + tl.arange(0, G.wide)[None, :]
    within = (at >= 0) & (at < G.width * G.inner)
    weights = ()
    for number in tl.static_range(tl.constexpr(G.taps)):
        weights = weights + (_weights(weight, number, channel, G, 2),)  # noqa: RUF005 - Triton's
    valid = _exists(pair[:, None], tl.arange(0, 2 * G.channels)[None, :] // G.channels, G)
    start = tl.program_id(1) * G.strip
    top = 2 * start - G.pool_padding
    _, above = _two_lines(x, weights, image[:, None] + at, within, top - 1, valid, G, False)
    seen = tl.full((G.pairs,), 0, tl.int32)
    for step in range(G.strip):
        top = 2 * (start + step) - G.pool_padding
        upper, lower = _two_lines(x, weights, image[:, None] + at, within, top + 1, valid, G, True)
        best = _maximum(_maximum(above, upper), lower)
        above = lower
        first, second = tl.split(tl.reshape(best, (G.pairs, 2, G.channels)).permute(0, 2, 1))
        found = _store_line(y, first, second, added, pair, target, stored, start + step, G)
        seen = tl.maximum(seen, found)
    if tl.max(seen, 0) > 0:
        # The NaN may come from a pixel beside the window (see `_two_lines`): recompute exactly.
        after = at + G.stride_w * G.inner
        inside = (after >= 0) & (after < G.width * G.inner)
        for step in range(G.strip):
            top = 2 * (start + step) - G.pool_padding
            exists = _exists(pair, 0, G)
            first = _largest_of_column(
                x, weight, image[:, None] + at, within, top, exists, channel, G
            )
            exists = _exists(pair, 1, G)
            second = _largest_of_column(
                x, weight, image[:, None] + after, inside, top, exists, channel, G
            )
            _store_line(y, first, second, added, pair, target, stored, start + step, G)
