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
