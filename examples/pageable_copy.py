"""Provokes pageable-copy: each step sends a batch to the GPU from pageable host memory.

The driver must stage pageable memory, so the copy blocks despite `non_blocking=True`. `mended` pins
the batch once. The copy is short here; above 5 % of a step, it would also be found as copies.

    steady explain examples/pageable_copy.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn


class Fed(nn.Module):
    """Copies its batch to the device, then multiplies matrices."""

    def __init__(self, pinned: bool) -> None:
        super().__init__()
        self.pinned = pinned
        self.batch = torch.randn(512, 1024)  # not a buffer, so it stays on the host

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pinned and not self.batch.is_pinned():
            self.batch = self.batch.pin_memory()
        batch = self.batch.to(x.device, non_blocking=True)
        for _ in range(40):
            y = x @ x
        return batch, y


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Fed(pinned=False), torch.randn(4096, 4096, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Fed(pinned=True), torch.randn(4096, 4096, dtype=torch.bfloat16)
