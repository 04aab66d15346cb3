"""Provokes single-tensor-optimizer: Adam updates the parameters one by one.

`slow` uses the default loop on a CPU, a dozen operators per parameter. `mended` passes
`fused=True`, which needs one operator for all.

    steady explain examples/single_tensor_optimizer.py:slow --device cpu
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
    return training(foreach=False)


def mended() -> Workload:
    return training(fused=True)
