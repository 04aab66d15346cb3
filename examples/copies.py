"""Provokes copies: 64 small transfers to the GPU instead of one.

Each transfer costs the host a call and the GPU a gap, regardless of its size. `mended` keeps the
data in one block and copies that.

    steady explain examples/copies.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn


class Fed(nn.Module):
    """Copies data to the device, in pieces or as a whole, then multiplies matrices."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = list(
            torch.randn(64, 256).chunk(pieces)
        )  # not buffers, so they stay on the host

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        if not self.pieces[0].is_pinned():
            self.pieces = [piece.clone().pin_memory() for piece in self.pieces]
        pieces = [piece.to(x.device, non_blocking=True) for piece in self.pieces]
        for _ in range(40):
            y = x @ x
        return pieces, y


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Fed(pieces=64), torch.randn(4096, 4096, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Fed(pieces=1), torch.randn(4096, 4096, dtype=torch.bfloat16)
