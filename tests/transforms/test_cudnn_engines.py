from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from steadytorch.conv.module import engine_convolutions
from steadytorch.conv.training import EngineConv2d
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.results.candidate import LONGEST_SHOWN, TransformSpec
from steadytorch.transforms import create
from steadytorch.transforms.base import Applicable, NotApplicable, applied_in_order
from steadytorch.transforms.cudnn_engines import CudnnEngines
from steadytorch.workload.workload import Workload

GPU = DeviceFacts(device="cuda", cudnn="9.19.0")
KEY = "fprop/bias/fp16/last/i8x64x28x28/w64x64x1x1/s1x1/p0x0/d1x1/g1"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def workload(model: nn.Module | None = None) -> Workload:
    torch.manual_seed(0)
    return Workload((model or Net()).eval(), torch.randn(2, 3, 8, 8))


def training(module: nn.Module | None = None) -> Workload:
    given = workload(module)
    model: nn.Module = given.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload.training(model, given.inputs, lambda y: y.square().mean(), optimizer)


def spec(choices: str) -> TransformSpec:
    return TransformSpec("cudnn_engines", (("choices", choices),))


@pytest.mark.parametrize(
    "choices",
    ["x", "[]", json.dumps({"conv": "eng1"}), json.dumps({KEY: "import os"}), json.dumps({KEY: 1})],
)
def test_choices_of_another_form_are_refused(choices):
    with pytest.raises(UsageError):
        create(spec(choices))


def test_choices_come_back_as_data():
    text = json.dumps({KEY: "c4:eng48"}, separators=(",", ":"))
    assert create(spec(text)).spec == spec(text)


def test_long_choices_are_shown_by_a_check_sum():
    one, two = (str(spec(json.dumps({KEY: f"eng{n}"}))) for n in (1, 2))
    assert len(one) < LONGEST_SHOWN
    assert one != two
    assert str(spec("")) == "cudnn_engines"


@pytest.mark.parametrize(
    ("made", "facts", "reason"),
    [
        (workload(), DeviceFacts(device="cpu"), "no CUDA device"),
        (workload(nn.Linear(8, 8)), GPU, "the model has no convolution"),
        (Workload(torch.relu, torch.randn(2)), GPU, "plain callable"),
        (training(), DeviceFacts(device="cpu"), "no CUDA device"),
        (training(nn.Linear(8, 8)), GPU, "the model has no convolution"),
        (training(nn.ConvTranspose2d(3, 4, 3)), GPU, "no convolution is supported"),
    ],
)
def test_it_says_why_it_does_not_apply(made, facts, reason, monkeypatch):
    monkeypatch.setattr("steadytorch.transforms.cudnn_engines.find_spec", lambda name: name)
    found = CudnnEngines().applies_to(made, facts)
    assert isinstance(found, NotApplicable)
    assert reason in found.reason


def test_it_names_the_extra_that_is_missing(monkeypatch):
    monkeypatch.setattr("steadytorch.transforms.cudnn_engines.find_spec", lambda name: None)
    found = CudnnEngines().applies_to(workload(), GPU)
    assert isinstance(found, NotApplicable)
    assert "steadytorch[cudnn]" in found.reason
    monkeypatch.setattr("steadytorch.transforms.cudnn_engines.find_spec", lambda name: name)
    assert isinstance(CudnnEngines().applies_to(workload(), GPU), Applicable)


@pytest.mark.parametrize("around", [[], ["channels_last"], ["cast_weights", "channels_last"]])
def test_it_rewrites_the_model_inside_of_conversions(around):
    given = workload()
    parameters = {"cast_weights": (("dtype", "bf16"),)}
    specs = [TransformSpec(name, parameters.get(name, ())) for name in around]
    transforms = [create(s) for s in (*specs, spec(""))]
    with torch.no_grad(), applied_in_order(transforms, given) as applied:
        found = applied.model(*given.inputs)
        assert len(engine_convolutions(applied.model)) == 1
        expected = given.model(*given.inputs)
    tolerance = 2e-2 if "cast_weights" in around else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not engine_convolutions(given.model)


def test_the_models_weights_stay_as_they_were():
    given = workload()
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    with applied_in_order([create(spec(""))], given):
        pass
    assert all(torch.equal(v, before[n]) for n, v in given.model.state_dict().items())


class Counts(Net):
    """Takes decisions that no graph can hold, assigns a buffer, and has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_forward_hook(lambda *given: None)

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x) if x.sum() < 1e9 else x


def test_a_training_workload_needs_no_graph(monkeypatch):
    monkeypatch.setattr("steadytorch.transforms.cudnn_engines.find_spec", lambda name: name)
    assert isinstance(CudnnEngines().applies_to(training(Counts()), GPU), Applicable)
    assert isinstance(CudnnEngines().applies_to(workload(Counts()), GPU), NotApplicable)


@pytest.mark.parametrize("choices", ["", json.dumps({KEY: "eng1"})])
def test_training_through_it_trains_the_model_itself(choices):
    own, made = training(Counts()), training(Counts())
    kinds = [type(module) for module in made.model.modules()]
    with applied_in_order([create(spec(choices))], made) as applied:
        assert isinstance(applied.model.conv, EngineConv2d)
        assert list(applied.model.state_dict()) == list(made.model.state_dict())
        steps = own.step_function(), applied.step_function()
        for _ in range(3):
            torch.testing.assert_close(steps[1](), steps[0](), rtol=1e-6, atol=1e-6)
        assert [type(module) for module in made.model.modules()] == kinds
    found, expected = made.model.state_dict(), own.model.state_dict()
    assert int(found["seen"]) == int(found["norm.num_batches_tracked"]) == 3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_what_surrounds_training_surrounds_the_engines(monkeypatch):
    from steadytorch.conv import training as engines

    asked, run = [], engines.conv_engine_eagerly
    monkeypatch.setattr(
        engines, "conv_engine_eagerly", lambda *given: asked.append(given[0].dtype) or run(*given)
    )
    own, made = training(), training()
    cast = create(TransformSpec("autocast", (("dtype", "bf16"),)))
    with (
        applied_in_order([create(spec("")), cast], made) as applied,
        applied_in_order([cast], own) as expected,
    ):
        torch.testing.assert_close(applied.step_function()(), expected.step_function()())
    assert asked == [torch.bfloat16]


def test_shapes_that_no_engine_was_chosen_for_train_as_ever(monkeypatch):
    from steadytorch.conv import training as engines

    asked = []
    monkeypatch.setattr(engines, "conv_engine_eagerly", lambda *given: asked.append(given))
    made = training()
    with applied_in_order([create(spec(json.dumps({KEY: "eng1"})))], made) as applied:
        applied.step_function()()
    assert asked == []
