"""Provokes allocation-in-loop on a CPU: a large result is allocated anew in every step.

The C library hands blocks of this size (64 MB) back to the system at once, so that each step has
the kernel clear every page again. `mended` writes into a buffer that it keeps. Where the system
backs memory with huge pages by itself there are few faults, and rightly no finding.

    steady explain examples/allocation_in_loop.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn

ELEMENTS = 1 << 24


class Scale(nn.Module):
    """Doubles its input, into new memory or into a buffer."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.result = torch.empty(ELEMENTS if keep else 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.result):
            return torch.mul(x, 2.0, out=self.result)
        return torch.mul(x, 2.0)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Scale(keep=False), torch.ones(ELEMENTS)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Scale(keep=True), torch.ones(ELEMENTS)
