"""The torchao plug-in against a stand-in for torchao's `quantize_`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.plugins import Applicable, Workload
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.plugins import class_fault

SOURCE = Path(__file__).parents[2] / "plugins" / "torchao" / "steadytorch_torchao.py"
H100 = DeviceFacts(device="cuda", compute_capability="9.0")


class Quantised(torch.Tensor):
    """Weights rounded to 8 bits, as a subclass of tensors."""


def quantize_(model: nn.Module, config: object) -> None:
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        rounded = (layer.weight / scale).round() * scale
        layer.weight = nn.Parameter(rounded.detach().as_subclass(Quantised))


@pytest.fixture
def plugin(monkeypatch):
    spec = importlib.util.spec_from_file_location("steadytorch_torchao", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    ao, quantization = ModuleType("torchao"), ModuleType("torchao.quantization")
    ao.quantization = quantization  # type: ignore[attr-defined]
    for name in module.CONFIGS.values():
        setattr(quantization, name, type(name, (), {}))
    quantization.quantize_ = quantize_  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ao)
    monkeypatch.setitem(sys.modules, "torchao.quantization", quantization)
    return module


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    return Workload(model, torch.randn(4, 32))


def test_its_class_keeps_the_contract(plugin):
    assert class_fault("torchao", plugin.TorchAo) is None


@torch.no_grad()
def test_it_quantises_a_copy(plugin):
    made = workload()
    before = made.model(*made.inputs)
    with plugin.TorchAo().applied(made) as changed:
        found = changed.model(*made.inputs)
    error = float((found - before).norm() / before.norm())
    assert 0 < error < 0.05
    assert torch.equal(made.model(*made.inputs), before)


@torch.no_grad()
def test_it_quantises_16_bit_weights(plugin):
    made = workload()
    before = made.model(*made.inputs)
    assert not set(plugin.TorchAo().claims) & set(CastWeights().claims)
    with CastWeights().applied(made) as lower, plugin.TorchAo().applied(lower) as changed:
        found = changed.model(*made.inputs)
    error = float((found - before).norm() / before.norm())
    assert 0 < error < 0.05


def test_one_that_quantised_nothing_did_not_engage(plugin, monkeypatch):
    monkeypatch.setattr(sys.modules["torchao.quantization"], "quantize_", lambda *given: None)
    with (
        pytest.raises(UnsupportedError, match="quantised no layer"),
        plugin.TorchAo().applied(workload()),
    ):
        pass


def test_fp8_is_for_gpus_that_have_it(plugin):
    def names(capability):
        facts = DeviceFacts(device="cuda", compute_capability=capability)
        return {parameters.scheme for parameters in plugin.TorchAo.variants(facts)}

    assert names("8.0") == {"int8-weight", "int8-dynamic"}
    assert names("9.0") == set(plugin.CONFIGS)


def test_it_says_where_it_does_not_apply(plugin):
    transform, made = plugin.TorchAo(), workload()
    assert isinstance(transform.applies_to(made, H100), Applicable)
    assert "GPUs only" in transform.applies_to(made, DeviceFacts(device="cpu")).reason
    convolution = Workload(nn.Conv2d(3, 8, 3).eval(), torch.randn(1, 3, 8, 8))
    assert "no linear layer" in transform.applies_to(convolution, H100).reason
