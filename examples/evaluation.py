"""Provokes evaluation: a training loop validates on many batches after each step.

`slow` validates after every step, `mended` only once.

    steady run examples/evaluation.py slow
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def train(every: int, steps: int = 60) -> float:
    """Trains a small network; validates after every so many steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    criterion = nn.CrossEntropyLoss()
    hits = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if step % every == 0:
            hits = validate(model)
    return hits


@torch.no_grad()
def validate(model: nn.Module) -> float:
    """Accuracy on random data."""
    x, y = torch.randn(4096, 256), torch.randint(0, 10, (4096,))
    return (model(x).argmax(1) == y).float().mean().item()


def slow() -> None:
    train(every=1)


def mended() -> None:
    train(every=60)


if __name__ == "__main__":
    slow() if "slow" in sys.argv else mended()
