"""Modules that a worker process cannot import, and operators registered in them."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

from steadytorch.bench.bench_worker import own_errors, save_payload
from steadytorch.errors import UsageError
from steadytorch.measure.sampler import StepError
from steadytorch.process.child import describe
from steadytorch.workload import operators
from steadytorch.workload.serialization import save
from steadytorch.workload.workload import Workload

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return scaled(x)

def scaled(x):
    return x * SCALE

SCALE = 3.0
"""
OPERATORS = """
import torch
from torch import nn

@torch.library.custom_op("steady_travel::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@doubled.register_fake
def _(x):
    return torch.empty_like(x)

doubled.register_autograd(
    lambda ctx, gradient: gradient * ctx.factor,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", 2),
)
OVERLOAD = torch.ops.steady_travel.doubled.default

class Model(nn.Module):
    def forward(self, x):
        return OVERLOAD(x) + doubled(x) + torch.ops.steady_travel.doubled(x)
"""
RAW = """
import torch

library = torch.library.Library("steady_travel_raw", "DEF")
library.define("halved(Tensor x) -> Tensor")
library.impl("halved", lambda x: x / 2, "CompositeImplicitAutograd")

def halved(x):
    return torch.ops.steady_travel_raw.halved(x)
"""
OPEN = """
import pathlib, sys, torch
from steadytorch.workload.serialization import load
for path in sys.argv[1:]:
    workload = load(pathlib.Path(path))
    given = torch.ones(1, requires_grad=True)
    result = torch.compile(workload.model, backend="aot_eager", fullgraph=True)(given)
    result.backward()
    print(type(workload.model).__module__, result.item(), given.grad.item())
"""


def module(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> types.ModuleType:
    """A module that other processes cannot import, as in multiprocessing and notebooks."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(source, made.__dict__)
    return made


def called_by_a_worker(step: Callable[[torch.Tensor], object]) -> None:
    """Calls a step whose operator is missing, like a worker."""
    with own_errors():
        try:
            step(torch.ones(1))
        except AttributeError as error:
            raise StepError(np.empty(0), np.empty(0)) from error


def opened(*paths: Path) -> list[str]:
    """Contents of saved workloads in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_code_that_a_worker_cannot_import_travels_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = cloudpickle.list_registry_pickle_by_value()
    names = ("__mp_main__", "steady_made_by_hand", "steady_with_operators")
    for name in names:
        source = OPERATORS if name.endswith("operators") else MODEL
        model = module(monkeypatch, name, source).Model()
        save(Workload(model, torch.ones(1)), tmp_path / name)
    assert cloudpickle.list_registry_pickle_by_value() == before
    assert opened(*(tmp_path / name for name in names)) == [
        "__mp_main__ 3.0 3.0",
        "steady_made_by_hand 3.0 3.0",
        "steady_with_operators 6.0 6.0",
    ]


def test_an_operator_that_cannot_travel_is_named(monkeypatch: pytest.MonkeyPatch):
    made = module(monkeypatch, "steady_raw_operators", RAW)
    assert made.halved(torch.ones(1)) == 0.5
    made.library._destroy()
    with pytest.raises(UsageError, match="operator steady_travel_raw::halved") as caught:
        called_by_a_worker(made.halved)
    found = describe(caught.value)
    assert (found.type, "module that a worker process can import" in found.message) == ("", True)


def test_other_errors_stay_as_they_are():
    error = AttributeError("'Model' object has no attribute 'f'")
    assert operators.explained(error) is error


def test_an_operator_with_rules_for_tensor_subclasses_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = module(monkeypatch, "steady_subclassed", OPERATORS.replace("travel", "subclassed"))
    made.doubled.register_torch_dispatch(torch.nn.Parameter, lambda *_: NotImplemented)
    with pytest.raises(UsageError, match=r"^operator steady_subclassed::doubled has rules"):
        save_payload(Workload(made.Model(), torch.ones(1)), tmp_path)
    save_payload(Workload(torch.neg, torch.ones(1)), tmp_path)  # does not use the operator


def test_compiled_code_that_a_worker_cannot_import_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled = types.ModuleType("steady_extension")
    compiled.__file__ = f"/built/steady_extension{EXTENSION_SUFFIXES[0]}"
    monkeypatch.setitem(sys.modules, "steady_extension", compiled)
    with pytest.raises(UsageError, match="extension module steady_extension: put /built on"):
        save_payload(Workload(lambda x: compiled.add(x), torch.ones(1)), tmp_path)
