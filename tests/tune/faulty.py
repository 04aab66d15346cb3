"""Faulty transforms, one honest transform, and a worker that registers them.

Workers import this file by path, like the model.
"""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import time
from contextlib import contextmanager
from functools import partial

import msgspec
import torch
import trained
from torch import nn

from steadytorch import transforms
from steadytorch.bench import bench_worker
from steadytorch.measure.sampler import warm_up
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms.base import Applicable, Risk, Transform
from steadytorch.tune.tuning_worker import TuningHandler


class Slow(nn.Module):
    """A linear layer that sleeps in every call."""

    def __init__(self, delay_s=0.001):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.delay_s = delay_s

    def forward(self, x):
        time.sleep(self.delay_s)
        return self.linear(x)


EXCLUSIVE = ("the test",)
"""Claimed by all of these: they exclude one another."""


class Quick(Transform):
    """Removes the sleep: the only honest improvement."""

    name = "quick"
    risk = Risk.EXACT
    claims = EXCLUSIVE

    def applies_to(self, workload, facts):
        return Applicable()

    @contextmanager
    def applied(self, workload):
        model = copy.deepcopy(workload.model)
        model.delay_s = 0.0
        yield workload.with_model(model)


class Faulty(Transform):
    """As fast as `Quick`, but wrong in the way its parameter names."""

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        kind: str = "nan"

    name = "faulty"
    risk = Risk.EXACT
    claims = EXCLUSIVE

    def applies_to(self, workload, facts):
        return Applicable()

    @contextmanager
    def applied(self, workload):
        if self.parameters.kind == "raises":
            raise ArithmeticError("this cannot be applied")
        model = copy.deepcopy(workload.model)
        model.delay_s = 0.0
        yield workload.with_model(Misbehaving(self.parameters.kind, model))


class Misbehaving:
    def __init__(self, kind, model):
        self.kind, self.model = kind, model
        self.buffer = torch.zeros(())

    def __call__(self, x):
        return getattr(self, self.kind, self.model)(x)

    def exits(self, x):
        os._exit(7)

    def hangs(self, x):
        while True:
            time.sleep(0.1)

    def stops(self, x):
        os.kill(os.getpid(), signal.SIGSTOP)

    def segfaults(self, x):
        ctypes.string_at(0)

    def exhausts(self, x):
        return torch.empty(1 << 50) + x

    def nan(self, x):
        return self.model(x) * float("nan")

    def wrong(self, x):
        return self.model(x) * 1.001

    def shape(self, x):
        return self.model(x)[:1]

    def dtype(self, x):
        return self.model(x).double()

    def nests(self, x):
        return [self.model(x)]

    def writes(self, x):
        out = self.model(x)
        x.add_(1)
        return out

    def aliases(self, x):
        with torch.no_grad():
            out = self.model(x)
            if self.buffer.shape != out.shape:
                self.buffer = torch.empty_like(out)
            return self.buffer.copy_(out)


class TrainedAs(Transform):
    """Trains like one of the candidates in trained.py."""

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        kind: str = "honest"

    name = "trained_as"
    risk = Risk.EXACT
    claims = EXCLUSIVE

    def applies_to(self, workload, facts):
        return Applicable()

    @contextmanager
    def applied(self, workload):
        yield workload.with_model(trained.Candidate(self.parameters.kind, workload.model))


class FaultyHandler(TuningHandler):
    """A tuning worker in which the transforms above are registered."""

    def __init__(self, directory):
        transforms.REGISTRY, transforms.POSITIONS = extended()
        # Saves half a second in each of dozens of processes; these models need no warm-up.
        bench_worker.warm_up = partial(warm_up, min_ns=10_000_000)
        super().__init__(directory)

    def block(self, metric, count):
        if getattr(self.model, "kind", "") == "dies_late":
            os._exit(9)
        return super().block(metric, count)


def extended():
    """The registry and its order, with this file's mutually exclusive transforms added."""
    kinds = (Quick, Faulty, TrainedAs)
    known = {kind.name for kind in transforms.REGISTRY}
    registry = (*transforms.REGISTRY, *(kind for kind in kinds if kind.name not in known))
    return registry, {kind.name: position for position, kind in enumerate(registry)}


def spec(kind):
    """A candidate with one fault."""
    return TransformSpec("faulty", (("kind", kind),))
