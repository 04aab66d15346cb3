"""Provokes clock-throttled: large matrix products reach the GPU's power limit.

Random data toggles many transistors, so the driver lowers the clock to stay below the limit.
`mended` multiplies small matrices, which draw far less power. It shows that power is the cause and
not the program. If the limit is fixed, there is nothing else to fix. A GPU whose largest products
stay below its limit does not show the finding.

    steady explain examples/clock_throttled.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

LARGE, SMALL = 8192, 512


class Products(nn.Module):
    """Multiplies a matrix by itself several times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            y = x @ x
        return y


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(LARGE, LARGE, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(SMALL, SMALL, dtype=torch.bfloat16)
