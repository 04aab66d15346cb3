from __future__ import annotations

import json

import pytest
import torch

from steadytorch.conv.choose import ConvOutcome
from steadytorch.conv.timing import Measured
from steadytorch.device import facts as device_facts
from steadytorch.device.facts import DeviceFacts
from steadytorch.tune import engines
from steadytorch.tune.conv import ConvReport, Layer, problems_in_training

from .conftest import only_line


def test_without_a_gpu_it_says_what_it_needs(steady):
    shown = steady("conv", "resnet18", "--device", "cpu")
    assert shown.code == 3
    assert "needs a CUDA device" in only_line(shown.err)
    assert steady("conv", "nosuch.py:factory", "--device", "cpu").err == shown.err


def test_a_budget_that_is_no_time_is_refused_before_anything_is_said(steady):
    shown = steady("conv", "resnet18", "--budget", "soon")
    assert (shown.code, shown.out) == (2, "")
    assert "'soon' is not a time" in only_line(shown.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(steady):
    shown = steady("conv", "resnet18", "--device", "cuda")
    assert shown.code == 3
    assert "is not available" in only_line(shown.err)


# -- a training step, with the choice of engines on a GPU replaced by recorded figures ------------

CONVOLUTIONS = """
import functools
import torch
from torch import nn
from steadytorch.workload.workload import Workload

def trained(batch=2):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return Workload.training(model, torch.randn(batch, 3, 8, 8), torch.Tensor.sum, sgd)
"""


def chosen(workload, facts, plans, *, prefix=(), **asked):
    """The problems of a training step, each with the same figures."""
    assert workload.is_training
    engine = Measured("eng1", 40_000.0, 0.01, 28, 1 << 20, (), 2e-4, None, True)
    layers = [
        Layer.of(
            tuple(names),
            problem.key,
            ConvOutcome(problem.key, "eng1", 80_000.0, 60_000.0, 40_000.0, (engine,), 0.1),
            problem.operations,
            problem.traffic_bytes,
        )
        for problem, names in problems_in_training(workload, prefix).problems.items()
    ]
    return ConvReport(tuple(layers), "", True, 8e14, 4e12, 91900, 1.0)


@pytest.fixture
def gpu(monkeypatch, folder):
    """A described device, and figures in place of measurements."""
    described = DeviceFacts(device="cuda", name="GPU", compute_capability="9.0", cudnn="9.19.0")
    for module in (device_facts, engines):
        monkeypatch.setattr(module, "resolve_device", lambda request: "cuda")
        monkeypatch.setattr(module, "load_facts", lambda device: described)
    monkeypatch.setattr(engines, "choose_and_keep", chosen)
    (folder / "net.py").write_text(CONVOLUTIONS)


@pytest.mark.usefixtures("gpu")
def test_a_training_step_shows_its_three_passes(steady, folder):
    shown = steady("conv", "net.py:trained", "--train", "--json", folder / "found.json")
    assert shown.code == 0, shown.err
    assert "net.py:trained: 5 passes of distinct convolutions in a training step" in shown.out
    rows = json.loads((folder / "found.json").read_text())["layers"]
    assert [row["pass"] for row in rows] == ["fprop", "wgrad", "fprop", "dgrad", "wgrad"]
    assert [len(row["names"]) for row in rows] == [1, 1, 2, 2, 2]


@pytest.mark.usefixtures("gpu")
def test_a_row_of_a_training_step_shows_its_engines(steady):
    shown = steady("conv", "net.py:trained", "--train", "--layer", "4")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[1].startswith("dgrad/none/")
    assert "eng1 *" in shown.out


@pytest.mark.usefixtures("gpu")
def test_a_row_that_there_is_not_costs_no_result(steady, folder):
    asked = ("--layer", "6", "--json", folder / "found.json")
    shown = steady("conv", "net.py:trained", "--train", *asked)
    assert shown.code == 2
    assert "the table of net.py:trained has 5 rows" in shown.err
    assert len(json.loads((folder / "found.json").read_text())["layers"]) == 5


@pytest.mark.usefixtures("gpu")
def test_a_bundled_network_is_trained_where_asked_for(steady):
    shown = steady("conv", "resnet18@channels_last", "--train", "--input", "2x3x32x32")
    assert shown.code == 0, shown.err
    assert "wgrad/none/tf32/last/" in shown.out


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("transform", ["inference_mode", "cuda_graph", "compile(reduce-overhead)"])
def test_transforms_that_decide_no_engines_are_no_part_of_a_training_step(steady, transform):
    shown = steady("conv", f"net.py:trained@{transform}", "--train")
    assert shown.code == 2
    assert "does not apply to choosing engines for the training step" in only_line(shown.err)
