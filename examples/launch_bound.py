"""Provokes launch-bound: a batch is worked through row by row.

Each kernel of `slow` is over long before the host has launched the next. `mended` gives the whole
batch to the same four operators. Where the work cannot be joined, a CUDA graph launches many
kernels at once.

    steady explain examples/launch_bound.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

ROWS, WIDTH = 256, 1 << 16


def squashed(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sin(x) * 0.5 + 1.0)


class RowByRow(nn.Module):
    """Treats the rows of a batch one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([squashed(row) for row in x])


class AllAtOnce(nn.Module):
    """Treats them together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squashed(x)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return RowByRow(), torch.randn(ROWS, WIDTH)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return AllAtOnce(), torch.randn(ROWS, WIDTH)
