"""Provokes tensor-cores-unused: products in float32, for which PyTorch uses CUDA cores.

`mended` multiplies in bfloat16. `torch.set_float32_matmul_precision("high")` would use tensor cores
through TF32 and keep float32 weights.

    steady explain examples/tensor_cores_unused.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn


class Products(nn.Module):
    """Multiplies a matrix by itself a few times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = x @ x
        return y


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(4096, 4096)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(4096, 4096, dtype=torch.bfloat16)
