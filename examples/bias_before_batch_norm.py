"""Provokes bias-before-batch-norm: convolutions add a bias that the batch norm removes.

A batch norm subtracts the mean, including any bias. `mended` creates the convolutions without bias.
With trained weights, move the bias into the batch norm first.

    steady explain examples/bias_before_batch_norm.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn


def network(bias: bool) -> nn.Module:
    blocks = (
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=bias), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(3)
    )
    return nn.Sequential(*blocks).eval()


def slow() -> tuple[nn.Module, torch.Tensor]:
    return network(bias=True), torch.randn(4, 16, 32, 32)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return network(bias=False), torch.randn(4, 16, 32, 32)
