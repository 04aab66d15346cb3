"""Workloads that tests explain in workers; loaded from this file like a user's factory."""

from __future__ import annotations

import gc
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steadytorch.workload.workload import Workload


def tiny():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8))
    return layers.eval(), torch.ones(32, 128)


def training():
    torch.manual_seed(0)
    return Workload.training(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        torch.ones(8, 16),
        lambda out: out.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


class Fetching(nn.Module):
    """Takes its inputs from a loader, another batch for every call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        loader = DataLoader(TensorDataset(torch.arange(64.0).reshape(4, 16)), batch_size=2)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def __getstate__(self):
        return {**self.__dict__, "batches": None}

    def __setstate__(self, state):
        fresh = Fetching()
        self.__dict__.update(state, batches=fresh.batches)

    def forward(self):
        (batch,) = next(self.batches)
        return self.layer(batch)


def fetching():
    return Workload(Fetching().eval())


class Collecting(nn.Module):
    """Runs the garbage collector in every call."""

    def forward(self, x):
        gc.collect()
        return x + 1


def collecting():
    return Collecting().eval(), torch.ones(8)


class UnderProfiler(nn.Module):
    """Raises while a profiler runs."""

    def forward(self, x):
        if torch.autograd._profiler_enabled():
            raise RuntimeError("not while you watch\x1b[2J")
        return x + 1


def shy():
    return UnderProfiler().eval(), torch.ones(8)


class Failing(nn.Module):
    """Raises from one call on."""

    def __init__(self, call):
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.call:
            raise RuntimeError("the data ended")
        return x + 1


def at_once():
    return Failing(1).eval(), torch.ones(8)


def while_timed():
    """Warm-up takes at most 2,000 calls."""
    return Failing(3000).eval(), torch.ones(8)
