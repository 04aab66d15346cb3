"""Provokes unfused-optimizer: Adam passes over all parameters a dozen times.

`slow` uses the foreach implementation, the default on a GPU. `mended` passes `fused=True`, which
updates all parameters in one pass.

    steady explain examples/unfused_optimizer.py:slow --device cpu
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from steadytorch import Workload


def training(**options: bool) -> Workload:
    layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))
    adam = partial(torch.optim.Adam, lr=1e-4, **options)
    return Workload.training(nn.Sequential(*layers), torch.randn(32, 64), torch.mean, adam)


def slow() -> Workload:
    return training(foreach=True)


def mended() -> Workload:
    return training(fused=True)
