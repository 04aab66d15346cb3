"""Provokes script-work: a training loop formats and parses a long report in each step.

`slow` does it after every step, `mended` only once.

    steady run examples/script_work.py slow
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn


def train(every: int, steps: int = 60) -> float:
    """Trains a small network; reports after every so many steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for step in range(steps):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            total += report(loss)
    return total


def report(loss: torch.Tensor) -> float:
    """Writes and reads back a report of the loss."""
    lines = [{"line": line, "loss": loss.item()} for line in range(10_000)]
    return json.loads(json.dumps(lines))[0]["loss"]


def slow() -> None:
    train(every=1)


def mended() -> None:
    train(every=60)


if __name__ == "__main__":
    slow() if "slow" in sys.argv else mended()
