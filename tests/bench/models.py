"""Workloads that tests measure in workers: short, slow, training and failing ones.

Loaded with `load_workload`, like users' factories.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
from torch import nn

from steadytorch.workload.workload import Workload

SLEEP_S = 0.001


class Work(nn.Module):
    """Adds one to its input many times."""

    def __init__(self, times=1):
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(60 * self.times):
            x = x + 1
        return x


class Failing(nn.Module):
    """Sleeps, and raises from one call on."""

    def __init__(self, call):
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.call:
            raise RuntimeError("the data ended\x1b[2J\nfor good")
        time.sleep(SLEEP_S)
        return x


def _fixed(model):
    return model.eval(), torch.ones(8)


def short():
    return _fixed(Work())


def thrice():
    return _fixed(Work(3))


def at_once():
    return _fixed(Failing(1))


def while_warming_up():
    return _fixed(Failing(50))


def while_timed():
    return _fixed(Failing(1000))


def unpicklable():
    model = Work()
    model.lock = threading.Lock()
    return _fixed(model)


def training():
    torch.manual_seed(0)
    return Workload.training(
        nn.Linear(8, 8),
        torch.ones(4, 8),
        lambda out: out.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


class Dying(Failing):
    """Sleeps, and kills its process from one call on."""

    def forward(self, x):
        self.calls += 1
        if self.calls >= self.call:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLEEP_S)
        return x


def killed_while_timed():
    return _fixed(Dying(1000))
