"""Provokes interpreter-lock: a thread of the script computes in Python while it trains.

`slow` starts the thread, `mended` does its work once before the training.

    steady run examples/interpreter_lock.py slow
"""

from __future__ import annotations

import sys
import threading

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


def summarize(stop: threading.Event) -> int:
    """Adds up numbers in Python, until told to stop."""
    total = 0
    while True:
        for number in range(10_000):
            total += number % 7
        if stop.is_set():
            return total


def slow() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=summarize, args=(stop,), name="summary")
    thread.start()
    train()
    stop.set()
    thread.join()


def mended() -> None:
    stop = threading.Event()
    stop.set()
    summarize(stop)
    train()


if __name__ == "__main__":
    slow() if "slow" in sys.argv else mended()
