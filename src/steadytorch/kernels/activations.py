"""PyTorch functions for the activations that fused convolutions and Linears support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "": lambda x: x,
        "relu": F.relu,
        "relu6": F.relu6,
        "hardsigmoid": F.hardsigmoid,
        "hardswish": F.hardswish,
        "sigmoid": lambda x: x.sigmoid(),
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
)
"""Activation functions by name; the Triton kernels use the same names."""
