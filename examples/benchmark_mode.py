"""Provokes benchmark-mode: cuDNN's benchmark mode is on, but the model has no convolutions.

The mode times cuDNN engines for convolutions on a GPU. It does nothing for other layers or on a
CPU. `mended` leaves it off.

    steady explain examples/benchmark_mode.py:slow
"""

from __future__ import annotations

import torch
from torch import nn


class Products(nn.Module):
    """Two layers without a convolution."""

    def __init__(self, switched: bool) -> None:
        super().__init__()
        self.switched = switched
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.switched:
            # Imported here, because cudnn's module object cannot be pickled for the worker.
            from torch.backends import cudnn

            cudnn.benchmark = True
        return self.layers(x)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Products(switched=True), torch.randn(256, 512)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Products(switched=False), torch.randn(256, 512)
