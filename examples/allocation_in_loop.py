"""Provokes allocation-in-loop on a CPU: every step allocates a large result.

The C library returns blocks of this size (64 MB) to the system at once, so the kernel clears all
pages again in each step. `mended` reuses a buffer. With transparent huge pages there are few page
faults, and correctly no finding.

    steady explain examples/allocation_in_loop.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn

ELEMENTS = 1 << 24


class Scale(nn.Module):
    """Doubles its input, into new memory or a buffer."""

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
