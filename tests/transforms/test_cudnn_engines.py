from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from steadytorch.conv.module import engine_convolutions
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.transforms import create
from steadytorch.transforms.base import (
    LONGEST_SHOWN,
    Applicable,
    NotApplicable,
    TransformSpec,
    applied_in_order,
)
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
