"""Provokes clock-throttled: large products draw more power than the GPU may.

Random numbers switch as many transistors as there are, and the driver lowers the clock to stay
below the power limit. `mended` multiplies matrices that fill a small part of the GPU, which draw
far less: it shows that power is the cause, and not the program. Where the limit is the machine's to
set, there is no more to mend. A GPU that can cool what its largest products draw does not show the
finding.

    steady explain examples/clock_throttled.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

LARGE, SMALL = 8192, 512


class Products(nn.Module):
    """Multiplies a large matrix by itself, again and again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            y = x @ x
        return y


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(LARGE, LARGE, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Products(), torch.randn(SMALL, SMALL, dtype=torch.bfloat16)
