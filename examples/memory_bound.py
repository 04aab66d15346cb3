"""Provokes memory-bound: passes over a large tensor with little work per element.

`slow` scales its input in three passes before the matrix product. `mended` folds the factors into
the matrix once and reads the input a single time. If passes cannot be folded, `torch.compile` fuses
them into one.

    steady explain examples/memory_bound.py:slow
"""

from __future__ import annotations

import torch
from torch import nn

ROWS, WIDTH = 1 << 17, 128


class Scaled(nn.Module):
    """Computes (x / deviation * gain * temperature) @ weight."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        factors = torch.rand(3, WIDTH) + 1.0
        weight = torch.randn(WIDTH, WIDTH)
        if folded:
            weight = (factors[1] * factors[2] / factors[0])[:, None] * weight
        self.folded = folded
        self.factors, self.weight = nn.Parameter(factors), nn.Parameter(weight)
        self.kept = nn.ParameterList(torch.empty(ROWS, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between, result = self.kept
        if not self.folded:
            deviation, gain, temperature = self.factors
            x = torch.div(x, deviation, out=between).mul_(gain).mul_(temperature)
        return torch.mm(x, self.weight, out=result)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Scaled(folded=False), torch.randn(ROWS, WIDTH)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Scaled(folded=True), torch.randn(ROWS, WIDTH)
