"""Programs for the convolutions of separable networks, in Triton: pointwise and depthwise ones.

As those of `programs`, each computes in float32.
"""

# ruff: noqa: N803 - constants of a program are written in capitals, as Triton's users know them

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clipped(value, low, high):
    """As PyTorch's clamp: NaN stays NaN."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """The activation of this name out of `activations.ACTIVATIONS`, in float32."""
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
    """A product of matrices: pixels of all images by channels, times channels by outputs.

    Sizes are variables, so that one compiled program serves many layers; steps of as many as lie in
    16 bytes, where they can, tell the compiler that rows begin at such addresses. Blocks of outputs
    follow each other, so that those that read the same pixels run at the same time. GATE is "" for
    none, "one" where all rows of a program are of one image, "each" where they need not be.
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
