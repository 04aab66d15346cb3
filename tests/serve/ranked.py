"""What each rank of `test_ranks` runs: a training loop under DDP, served by a stored plan.

Started by torchrun with the store, the folder for what it finds, and the ranks that have no plan.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import steadytorch as steady

STEPS = 3


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers).train()


def make_workload() -> steady.Workload:
    return steady.Workload.training(make_net(), torch.ones(2, 3, 8, 8), torch.sum, torch.optim.SGD)


def train(model: nn.Module, rank: int) -> torch.Tensor:
    """The weights after some steps on batches of the rank's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main(store: str, folder: Path, without: list[int]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = str(folder / "empty") if rank in without else store
    net = make_net()
    try:
        fast = steady.tune(make_workload(), store=mine, mode="strict").apply(net)
        counts = fast.report
    except steady.PlanError:
        fast, counts = net, None
    tuned = train(DistributedDataParallel(fast), rank)
    untouched = train(DistributedDataParallel(make_net()), rank)
    found = {
        "calls": {} if counts is None else counts().calls,
        "weights": tuned.tolist(),
        "untouched": untouched.tolist(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # PyTorch's own end of a group over gloo aborts about once in 45 times, without us as well.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(rank) for rank in sys.argv[3:]])
