"""The Torch-TensorRT plug-in against a stand-in for its compiler; it is not run on a GPU here."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.plugins import Applicable, Workload
from steadytorch.transforms.plugins import class_fault

SOURCE = Path(__file__).parents[2] / "plugins" / "torch_tensorrt" / "steadytorch_torch_tensorrt.py"
H100 = DeviceFacts(device="cuda", compute_capability="9.0")


class PythonTorchTensorRTModule(nn.Module):
    """Holds an engine."""

    def __init__(self, program):
        super().__init__()
        self.run = program.module()

    def forward(self, *args, **kwargs):
        return self.run(*args, **kwargs)


class Compiled(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts
        for i, part in enumerate(parts):
            self.add_module(f"_run_{i}", part)

    def forward(self, *args, **kwargs):
        return self.parts[0](*args, **kwargs)


@pytest.fixture
def asked():
    return {}


@pytest.fixture
def plugin(monkeypatch, asked):
    spec = importlib.util.spec_from_file_location("steadytorch_torch_tensorrt", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    def compile_program(program, **settings):
        asked.update(settings)
        return Compiled(PythonTorchTensorRTModule(program))

    library = ModuleType("torch_tensorrt")
    library.__spec__ = ModuleSpec("torch_tensorrt", None)
    library.dynamo = SimpleNamespace(compile=compile_program)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_tensorrt", library)
    return module


def workload() -> Workload:
    return Workload(nn.Linear(8, 4).eval(), torch.randn(2, 8))


def test_its_class_keeps_the_contract(plugin):
    assert class_fault("torch_tensorrt", plugin.TorchTensorRt) is None


@pytest.mark.parametrize(
    ("name", "precision", "types"),
    [("f32", "same", {torch.float32}), ("fp16", "fp16", {torch.float32, torch.float16})],
)
def test_it_asks_for_its_precision_and_for_the_whole_model(plugin, asked, name, precision, types):
    transform = plugin.TorchTensorRt(plugin.TorchTensorRt.Parameters(name))
    made = workload()
    with transform.applied(made) as changed:
        found = changed.model(*made.inputs)
    torch.testing.assert_close(found, made.model(*made.inputs).detach())
    assert not found.requires_grad
    assert transform.precision == precision
    assert asked["enabled_precisions"] == types
    assert asked["disable_tf32"]
    assert asked["require_full_compilation"]


def test_a_part_left_to_pytorch_is_refused(plugin):
    program = torch.export.export(nn.Linear(8, 4), (torch.randn(2, 8),), strict=False)
    with pytest.raises(UnsupportedError, match="left 1 parts"):
        plugin.prove(Compiled(PythonTorchTensorRTModule(program), nn.Linear(4, 4)))
    with pytest.raises(UnsupportedError, match="took no part"):
        plugin.prove(nn.Linear(8, 4))


def test_it_says_where_it_does_not_apply(plugin, monkeypatch):
    transform, made = plugin.TorchTensorRt(), workload()
    assert isinstance(transform.applies_to(made, H100), Applicable)
    assert "no CUDA" in transform.applies_to(made, DeviceFacts(device="cpu")).reason
    half = Workload(made.model.half(), made.inputs)
    assert "float16" in transform.applies_to(half, H100).reason
    monkeypatch.delitem(sys.modules, "torch_tensorrt")
    assert "not installed" in transform.applies_to(workload(), H100).reason
