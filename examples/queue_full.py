"""Provokes queue-full: the host is a thousand launches ahead of the GPU.

`slow` launches 2,000 tiny operators behind matrix products of tens of milliseconds. The finding is
informational: the GPU is always busy, and launching calls only wait for space in the queue.
`mended` replaces them with one operator, so the queue stays short.

    steady explain examples/queue_full.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

COUNTERS = 2000


class Ahead(nn.Module):
    """Long products, then an addition to all counters, one by one or at once."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.counters = nn.Parameter(torch.zeros(COUNTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            y = x @ x
        if self.at_once:
            self.counters.add_(1.0)
        else:
            for counter in self.counters.unbind():
                counter.add_(1.0)
        return y


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Ahead(at_once=False), torch.randn(8192, 8192, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Ahead(at_once=True), torch.randn(8192, 8192, dtype=torch.bfloat16)
