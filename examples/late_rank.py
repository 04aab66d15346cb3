"""Provokes late-rank: one rank of a job waits for its data in each step.

With `slow`, rank 1 reads each batch slower than the others; with `mended`, all are alike.

    torchrun --nproc-per-node 2 --no-python steady run examples/late_rank.py slow
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[torch.Tensor]):
    """Random samples, each read in a given time.

    Args:
        pause_s: time to read a sample, in seconds.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return torch.randn(256)


def train(pause_s: float) -> None:
    """Trains a small network on all ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    for x in DataLoader(Numbers(pause_s), 16):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def slow() -> None:
    train(pause_s=1e-3 if os.environ.get("RANK") == "1" else 0.0)


def mended() -> None:
    train(pause_s=0.0)


if __name__ == "__main__":
    slow() if "slow" in sys.argv else mended()
