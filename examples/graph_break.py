"""Provokes graph-break: a branch on a tensor's value, which the compiler cannot trace.

`slow` calls `.item()` in the middle of the compiled function, which splits it into two graphs with
Python between them. `mended` selects between both results on the device.

    steady explain examples/graph_break.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn


def branching(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    if y.sum().item() > 0:
        y = -y
    return y @ x


def choosing(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    return torch.where(y.sum() > 0, -y, y) @ x


class Compiled(nn.Module):
    """Compiles its function at the first call."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.run = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.run is None:
            function = branching if self.branches else choosing
            self.run = torch.compile(function, backend="eager")
        return self.run(x)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Compiled(branches=True), torch.ones(256, 256) / 256


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Compiled(branches=False), torch.ones(256, 256) / 256
