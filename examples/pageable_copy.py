"""Provokes pageable-copy: each step sends a batch to the GPU from ordinary host memory.

The driver has to stage such memory, so the copy waits although it is asked not to (`non_blocking`).
`mended` pins the batch once. It is small beside the step here; a copy that takes more than 5 % of a
step would also be found by `copies`.

    steady explain examples/pageable_copy.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn


class Fed(nn.Module):
    """Copies its batch to the device, then multiplies matrices there."""

    def __init__(self, pinned: bool) -> None:
        super().__init__()
        self.pinned = pinned
        self.batch = torch.randn(512, 1024)  # an attribute, no buffer: it stays with the host

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
