"""Provokes idle-cores: PyTorch has one thread, as torchrun sets it by default.

`slow` trains on one thread, `mended` on one for each core.

    steady run examples/idle_cores.py slow
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn


def train(steps: int = 60) -> None:
    """Trains a network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    x, y = torch.randn(512, 256), torch.randint(0, 10, (512,))
    criterion = nn.CrossEntropyLoss()
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def slow() -> None:
    torch.set_num_threads(1)
    train()


def mended() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    train()


if __name__ == "__main__":
    slow() if "slow" in sys.argv else mended()
