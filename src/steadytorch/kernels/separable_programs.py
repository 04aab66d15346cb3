"""Triton kernels for pointwise, depthwise and small-channel convolutions.

A Linear layer runs as a pointwise convolution. All kernels accumulate in float32.
"""

# ruff: noqa: N803 - by Triton's convention, compile-time constants are in capitals

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clipped(value, low, high):
    """Clamp as PyTorch does: NaN stays NaN."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gelu(value):
    """GELU in its erf form, x * Phi(x), with Phi the normal CDF.

    The tail Phi(-|x|) is computed as 2 to the power of a fitted polynomial in |x|. Results have an
    absolute error of at most 3e-7 and a relative error of at most 1e-5. GELU with `tl.erf` takes
    three times as many instructions: 75 % of those of a matrix product over 96 channels. For
    negative inputs, 1 + erf also loses precision to cancellation where erf is near -1.
    """
    size = tl.abs(value)
    power = -1.0e-6 * size + 4.72963e-5
    power = power * size - 8.416717e-4
    power = power * size + 8.250238e-3
    power = power * size - 5.359812e-2
    power = power * size - 0.4586887
    power = power * size - 1.151207
    beyond = tl.exp2(power * size - 0.999995)
    return value * tl.where(value > 0.0, 1.0 - beyond, beyond)


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """Apply an activation of `activations.ACTIVATIONS` by name, in float32."""
    if ACTIVATION == "relu":
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "relu6":
        value = _clipped(value, 0.0, 6.0)
    if ACTIVATION == "hardsigmoid":
        value = _clipped(value + 3.0, 0.0, 6.0) / 6.0
    if ACTIVATION == "hardswish":
        value = value * _clipped(value + 3.0, 0.0, 6.0) / 6.0
    if ACTIVATION == "sigmoid":
        value = 1.0 / (1.0 + tl.exp(-value))
    if ACTIVATION == "silu":
        value = value / (1.0 + tl.exp(-value))
    if ACTIVATION == "gelu":
        value = _gelu(value)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u); the constant is -2 * sqrt(2 / pi).
        inner = -1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(inner))
    return value


@triton.jit
def pointwise_conv(
    x,
    weight,
    bias,
    gate,
    other,
    y,
    rows,
    output_steps,
    channel_steps,
    pixels,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    GATE: tl.constexpr,
    ADDED: tl.constexpr,
    OUTPUT_STEP: tl.constexpr,
    CHANNEL_STEP: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Matrix product (pixels of all images x channels) @ (channels x outputs).

    Sizes are variables, so that one compiled kernel serves many layers. Where possible, sizes are
    passed in units of 16 bytes, which tells the compiler that rows are aligned. Output blocks of
    the same pixels have consecutive program IDs, so that they run together and share L2.

    GATE is "" for no gate, "one" if all rows of a program belong to one image, "each" otherwise.
    """
    outputs = output_steps * OUTPUT_STEP
    channels = channel_steps * CHANNEL_STEP
    across = (outputs + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // across * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = (row < rows)[:, None]
    is_column = (column < outputs)[:, None]
    own = x + (row * channels)[:, None]
    taps = weight + (column * channels)[:, None]
    image = first // pixels
    if GATE == "each":
        image = (row // pixels)[:, None]
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, channels, DEPTH):
        at = (start + depth)[None, :]
        is_pixel = is_row
        is_tap = is_column
        if not EVEN:
            is_pixel &= at < channels
            is_tap &= at < channels
        value = tl.load(own + at, is_pixel, other=0.0)
        if GATE != "":
            if GATE == "each":
                scale = tl.load(gate + image * channels + at, is_pixel, other=0.0)
            elif EVEN:
                scale = tl.load(gate + image * channels + at)
            else:
                scale = tl.load(gate + image * channels + at, at < channels, other=0.0)
            value = (value.to(tl.float32) * scale.to(tl.float32)).to(x.dtype.element_ty)
        total = tl.dot(value, tl.trans(tl.load(taps + at, is_tap, other=0.0)), total)
    is_output = column < outputs
    if BIASED:
        total += tl.load(bias + column, is_output, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    at = (row * outputs)[:, None] + column[None, :]
    is_stored = is_row & is_output[None, :]
    if ADDED:
        total += tl.load(other + at, is_stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), is_stored)


@triton.jit
def _line_of_taps(taps, weight, has, LINE: tl.constexpr, G: tl.constexpr):
    """Append the weights of one line of the convolution kernel to the tuple `taps`."""
    for column in tl.static_range(tl.constexpr(G.kernel_w)):
        tap = tl.load(weight + (LINE * G.kernel_w + column) * G.all_channels, has, other=0.0)
        taps = taps + (tap.to(tl.float32),)  # noqa: RUF005 - Triton's
    return taps


@triton.jit
def _line_of_pixels(x, has, top, left, LINE: tl.constexpr, G: tl.constexpr):
    """Load one line of each patch's input window, as a tuple with one entry per column."""
    # Unsigned comparison, so that one check per load covers both edges. For a line outside of the
    # input, the width is set to 0, which masks all columns.
    row = (top + LINE).to(tl.uint32, bitcast=True)
    end = tl.where(has & (row < G.height), G.width, 0).to(tl.uint32)
    values = ()
    for column in tl.static_range(tl.constexpr(G.seen_columns)):
        wanted = has
        if G.clipped:
            wanted = (left + column).to(tl.uint32, bitcast=True) < end
        value = tl.load(x + (LINE * G.width + column) * G.all_channels, wanted, other=0.0)
        values = values + (value.to(tl.float32),)  # noqa: RUF005 - Triton's
    return values


@triton.jit
def _with_line(total, values, taps, COLUMN: tl.constexpr, BELOW: tl.constexpr, G: tl.constexpr):
    """Add input line `BELOW` of an output's window to the sum of that output, for each patch."""
    if BELOW >= 0 and BELOW % G.dilation_h == 0 and BELOW // G.dilation_h < G.kernel_h:
        for column in tl.static_range(tl.constexpr(G.kernel_w)):
            value = values[COLUMN * G.stride_w + column * G.dilation_w]
            # Explicit FMA: with separate operations, 7x7 without activation took 167 registers
            # instead of 121.
            total = tl.fma(value, taps[BELOW // G.dilation_h * G.kernel_w + column], total)
    return total


@triton.jit
def depthwise_conv(x, weight, bias, y, images, G: tl.constexpr):
    """Depthwise convolution with bias and activation; channels are innermost in all tensors.

    Each row of a tile is an output patch of `G.rows` by `G.columns` pixels; each column of a tile
    is a channel. Patches are numbered consecutively over lines and images. Each input pixel is
    loaded once for all outputs of a patch. Weights are loaded separately for each patch, so that
    every thread has the weights that it needs and threads exchange none.
    """
    blocks: tl.constexpr = (G.all_channels + G.channels - 1) // G.channels
    across: tl.constexpr = (G.out_width + G.columns - 1) // G.columns
    down: tl.constexpr = (G.out_height + G.rows - 1) // G.rows
    channel = tl.program_id(0) % blocks * G.channels + tl.arange(0, G.channels)[None, :]
    patch = tl.program_id(0) // blocks * G.patches + tl.arange(0, G.patches)[:, None]
    column = patch % across * G.columns
    row = patch // across % down * G.rows
    image = patch // across // down
    has = (image < images) & (channel < G.all_channels)
    own = tl.broadcast_to(channel, (G.patches, G.channels))

    first = tl.full((G.patches, G.channels), 0.0, tl.float32)
    if G.biased:
        first = tl.load(bias + own, has, other=0.0).to(tl.float32)
    totals = ()
    for _ in tl.static_range(tl.constexpr(G.rows * G.columns)):
        totals = totals + (first,)  # noqa: RUF005 - Triton's
    taps = ()
    top = row * G.stride_h - G.padding_h
    left = column * G.stride_w - G.padding_w
    pixels = x + (((image * G.height + top) * G.width + left) * G.all_channels + channel)
    for line in tl.static_range(tl.constexpr(G.seen_rows)):
        if line % G.dilation_h == 0 and line // G.dilation_h < G.kernel_h:
            taps = _line_of_taps(taps, weight + own, has, line // G.dilation_h, G)
        values = _line_of_pixels(pixels, has, top, left, line, G)
        sums = ()
        for output in tl.static_range(tl.constexpr(G.rows * G.columns)):
            total = _with_line(
                totals[output], values, taps, output % G.columns,
                line - output // G.columns * G.stride_h, G,
            )  # fmt: skip
            sums = sums + (total,)  # noqa: RUF005 - Triton's
        totals = sums
    target = y + (((image * G.out_height + row) * G.out_width + column) * G.all_channels + channel)
    for output in tl.static_range(tl.constexpr(G.rows * G.columns)):
        stored = has & (row + output // G.columns < G.out_height)
        stored &= column + output % G.columns < G.out_width
        to = (output // G.columns * G.out_width + output % G.columns) * G.all_channels
        total = activated(totals[output], tl.constexpr(G.activation))
        tl.store(target + to, total.to(y.dtype.element_ty), stored)


@triton.jit
def thin_conv(x, weight, bias, y, images, G: tl.constexpr):
    """Convolution of few channels with bias and activation, as an implicit matrix product.

    Rows of the matrix product are output pixels, numbered over lines and images. The depth of the
    matrix product is the taps of all channels, in blocks. Each thread holds one output pixel, with
    the inputs of its taps in registers. With one pixel per thread, tap offsets are part of the load
    instructions, and taps of a line or column share one bounds check. With taps spread over
    threads, each load would need its own address and two checks: nearly twice the instructions in
    total. Triton assigns threads to the first axis if neither axis is contiguous.
    """
    depth: tl.constexpr = G.kernel_h * G.kernel_w * G.channels
    blocks: tl.constexpr = (G.outputs + G.columns - 1) // G.columns
    size: tl.constexpr = G.out_height * G.out_width
    output = tl.program_id(0) % blocks * G.columns + tl.arange(0, G.columns)
    pixel = tl.program_id(0) // blocks * G.rows + tl.arange(0, G.rows)
    has, is_output = pixel < images * size, output < G.outputs
    image = pixel // size
    top = pixel // G.out_width % G.out_height * G.stride_h - G.padding_h
    left = pixel % G.out_width * G.stride_w - G.padding_w
    own = image * (G.channels * G.height * G.width) + (top * G.width + left) * G.x_column
    top = tl.where(has, top, G.height)  # below the image, so that its loads are masked
    total = tl.full((G.rows, G.columns), 0.0, tl.float32)
    for start in tl.static_range(0, depth, tl.constexpr(G.depth)):
        tap = start + tl.arange(0, G.depth)
        channel = tap % G.channels
        column = tap // G.channels % G.kernel_w
        row = tap // (G.channels * G.kernel_w)
        at = channel * G.w_channel + row * G.w_row + column * G.w_column
        at = at[:, None] + output[None, :] * G.w_output
        taps = tl.load(weight + at, (tap < depth)[:, None] & is_output[None, :], other=0.0)
        row, column = row * G.dilation_h, column * G.dilation_w
        at = channel * G.x_channel + (row * G.width + column) * G.x_column
        # Unsigned comparison, so that one check covers both edges.
        inside = (top[:, None] + row[None, :]).to(tl.uint32, bitcast=True) < G.height
        inside &= (left[:, None] + column[None, :]).to(tl.uint32, bitcast=True) < G.width
        inside &= (tap < depth)[None, :]
        value = tl.load((x + own)[:, None] + at[None, :], inside, other=0.0)
        total = tl.dot(value, taps, total)
    if G.biased:
        total += tl.load(bias + output, is_output, other=0.0).to(tl.float32)[None, :]
    total = activated(total, tl.constexpr(G.activation)).to(y.dtype.element_ty)
    to = (pixel * G.outputs)[:, None] + output[None, :]
    stored = has[:, None] & is_output[None, :]
    if not G.out_last:
        to = (image * (G.outputs * size) + pixel % size)[:, None] + (output * size)[None, :]
        if size % 2 == 0:
            # Transposed, so that each thread stores several neighbouring pixels at once. Loads must
            # keep one pixel per thread, and Triton lays out loads and stores of one shape alike.
            to, total, stored = tl.trans(to), tl.trans(total), tl.trans(stored)
    tl.store(y + to, total, stored)
