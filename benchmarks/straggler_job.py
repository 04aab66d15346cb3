"""A profiled job of `stragglers.py` on CPUs with gloo; each rank writes its trace.

With `sleep`, rank 1 sleeps in each step; with `loader`, its data are slow; with `core`, other
processes run on its core; with `clean`, all ranks are alike.

    torchrun --nproc-per-node 4 benchmarks/straggler_job.py sleep
    steady explain rank*.json
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, Dataset

LATE = 1
PAUSE_S = 0.05
BUSY = 8
"""Processes beside the late rank, on its core."""
STEPS = schedule(wait=4, warmup=2, active=16, repeat=1)


class Numbers(Dataset[torch.Tensor]):
    """Random batches, each read in a given time.

    Args:
        pause_s: time to read a batch, in seconds.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return torch.randn(64, 512)


def train(rank: int, pause_s: float, sleep_s: float) -> None:
    """Trains a small network on all ranks."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with profile(schedule=STEPS, on_trace_ready=lambda p: write(p, rank)) as profiler:
        for x in DataLoader(Numbers(pause_s), batch_size=None):
            time.sleep(sleep_s)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            profiler.step()


def write(profiler: profile, rank: int) -> None:
    profiler.export_chrome_trace(f"rank{rank}.json")


def spin() -> None:
    while True:
        pass


@contextmanager
def busy_core(rank: int) -> Iterator[None]:
    """Gives the late rank a core with other processes, and the other ranks the other cores."""
    *others, shared = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {shared if rank == LATE else others[rank % len(others)]})
    count = BUSY if rank == LATE else 0
    beside = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in beside:
        process.start()
    try:
        yield
    finally:
        for process in beside:
            process.kill()


def main(what: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pause = PAUSE_S if rank == LATE else 0.0
    if what == "core":
        with busy_core(rank):
            train(rank, 0.0, 0.0)
    else:
        train(rank, pause * (what == "loader"), pause * (what == "sleep"))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
