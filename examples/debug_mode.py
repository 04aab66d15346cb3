"""Provokes debug-mode: autograd's anomaly detection is left on.

`slow` trains with it, `mended` without.

    steady run examples/debug_mode.py slow
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def train(steps: int = 100) -> None:
    """Trains a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    criterion = nn.CrossEntropyLoss()
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def slow() -> None:
    with torch.autograd.set_detect_anomaly(True):
        train()


def mended() -> None:
    train()


if __name__ == "__main__":
    slow() if "slow" in sys.argv else mended()
