"""Provokes equal-groups: an optimizer with a parameter group for each layer, all alike.

A step updates one group after the other. `mended` has one group of all parameters.

    steady explain examples/equal_groups.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn

from steadytorch import Workload


def training(grouped: bool) -> Workload:
    layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))
    model = nn.Sequential(*layers)
    groups = [{"params": layer.parameters()} for layer in model if isinstance(layer, nn.Linear)]
    given = groups if grouped else model.parameters()
    adam = torch.optim.Adam(given, lr=1e-4, fused=True)
    return Workload.training(model, torch.randn(32, 64), torch.mean, adam)


def slow() -> Workload:
    return training(grouped=True)


def mended() -> Workload:
    return training(grouped=False)
