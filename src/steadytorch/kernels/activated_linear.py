"""Fused Linear and activation, using the Triton kernel of pointwise convolutions.

With few features, writing, re-reading and rewriting the result costs more than the matrix product.
The fused kernel writes the result once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.operators import FusedOperator
from steadytorch.kernels.pointwise_tile import TYPES, is_within_reach, launch_for


def activated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = ""
) -> Tensor:
    """Compute `activation(linear(x, weight, bias))`, on CUDA in one kernel.

    The fused kernel accumulates in float32 and rounds once; PyTorch rounds after each step.

    Args:
        x: shape (..., C).
        weight: shape (K, C).
        bias: shape (K,), or None.
        activation: a key of `ACTIVATIONS`; "" for none.

    Returns:
        Shape (..., K).

    Raises:
        KeyError: unknown activation.
        RuntimeError: PyTorch's operators reject the arguments.
    """
    return OPERATOR(activated_linear, x, weight, bias, activation)


def _eager(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def program_for(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> PreparedActivatedLinear | None:
    """Return the launcher for these tensors on any device, or None if unsupported."""
    device, given = x.device, (x, weight, *(() if bias is None else (bias,)))
    if not all(t.device == device and t.is_contiguous() for t in given):
        return None
    shapes = (x.shape, weight.shape, None if bias is None else bias.shape)
    return prepared(*shapes, activation, x.dtype, device)


class PreparedActivatedLinear:
    """Prepared launch for inputs of one shape and type.

    Args:
        shape: shape of the result, (..., K).
        channels: input channels C.
        activation: a key of `ACTIVATIONS`.
        is_biased: whether a bias is added.
        device: device of the tensors.
    """

    def __init__(
        self,
        shape: torch.Size,
        channels: int,
        activation: str,
        is_biased: bool,
        device: torch.device,
    ) -> None:
        rows = shape[:-1].numel()
        kind = (activation, is_biased, False, False)
        self._shape = shape
        self._launch = launch_for((rows, shape[-1], channels), rows, *kind, device)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Launch the kernel and return its result; tensors must have the prepared shapes."""
        y = torch.empty(self._shape, dtype=x.dtype, device=x.device)
        self._launch(x, weight, x if bias is None else bias, x, x, y)
        return y


@lru_cache(maxsize=1024)
def prepared(
    x: torch.Size,
    weight: torch.Size,
    bias: torch.Size | None,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> PreparedActivatedLinear | None:
    """Return the launcher for these inputs, or None to use PyTorch's operators."""
    if dtype not in TYPES or activation not in ACTIVATIONS or len(x) < 2:
        return None
    if len(weight) != 2 or weight[1] != x[-1] or bias not in (None, weight[:1]):
        return None
    if not is_within_reach(x[:-1].numel(), *weight):
        return None
    full = torch.Size((*x[:-1], weight[0]))
    return PreparedActivatedLinear(full, x[-1], activation, bias is not None, device)


OPERATOR = FusedOperator(
    "activated_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    program_for,
    _eager,
)
