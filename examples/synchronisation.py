"""Provokes synchronisation: the host reads a number and waits for the GPU.

While the host waits, it launches nothing, so the GPU idles after every `.item()`. `mended` sums the
numbers on the GPU without waiting.

    steady explain examples/synchronisation.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn


class Watched(nn.Module):
    """Multiplies matrices and sums one element of each, on the host or on the GPU."""

    def __init__(self, on_host: bool) -> None:
        super().__init__()
        self.on_host = on_host

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = 0.0 if self.on_host else torch.zeros((), device=x.device)
        for _ in range(8):
            y = x @ x
            seen = seen + (y[0, 0].item() if self.on_host else y[0, 0].float())
        return y + seen


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Watched(on_host=True), torch.randn(4096, 4096, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Watched(on_host=False), torch.randn(4096, 4096, dtype=torch.bfloat16)
