"""Provokes launch-bound: a batch is processed row by row.

Each kernel of `slow` ends long before the host has launched the next. `mended` applies the same
operators to the whole batch. If work cannot be batched, a CUDA graph launches many kernels at
once.

    steady explain examples/launch_bound.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

ROWS, WIDTH = 256, 1 << 16


def squashed(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sin(x) * 0.5 + 1.0)


class RowByRow(nn.Module):
    """Processes the rows of a batch one by one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([squashed(row) for row in x])


class AllAtOnce(nn.Module):
    """Processes the whole batch at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squashed(x)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return RowByRow(), torch.randn(ROWS, WIDTH)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return AllAtOnce(), torch.randn(ROWS, WIDTH)
