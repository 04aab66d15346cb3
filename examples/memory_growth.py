"""Provokes memory-growth: results of all calls are kept in a list.

`slow` appends its output to a list, which grows by a quarter of a megabyte per call. `mended` keeps
the sum only.

    steady explain examples/memory_growth.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn


class Logged(nn.Module):
    """A layer that keeps something of each output."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
        self.keeps = keeps
        self.seen: list[torch.Tensor] = []
        self.sum = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.layer(x)
        if self.keeps:
            self.seen.append(x.clone())
        else:
            self.sum += x.sum().item()
        return x


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Logged(keeps=True), torch.ones(64, 1024)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Logged(keeps=False), torch.ones(64, 1024)
