"""A worker handler that chooses engines on this machine for a network of three convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from steadytorch import transforms
from steadytorch.bench.bench_worker import save_payload
from steadytorch.conv import choose_all, frontend
from steadytorch.results.conv import ConvOutcome, Measured
from steadytorch.tune import conv
from steadytorch.tune.conv import ConvHandler
from steadytorch.workload.workload import Workload


def workload() -> Workload:
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    return Workload(nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8))


def loaded(given: Workload, folder: Path) -> ConvHandler:
    save_payload(given, folder)
    made = ConvHandler(folder)
    made.load("cpu", transforms.ambient())
    return made


def chooser(patch: pytest.MonkeyPatch, folder: Path) -> ConvHandler:
    """A handler where `bias_relu`, the larger problem, runs out of memory."""

    def chosen(problem, device, options, incumbent):
        if problem.epilogue == "bias_relu":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return ConvOutcome(problem.key, "eng1", 2.0, 2.0, 1.0, (Measured("eng1"),), 0.1)

    patch.setattr(choose_all, "choose", chosen)
    patch.setattr(frontend, "version", lambda: 91900)
    patch.setattr(conv, "is_cold", lambda counts, device: False)
    patch.setattr(conv, "machine_rates", lambda problem, device: (1.0, 1.0))
    return loaded(workload(), folder)
