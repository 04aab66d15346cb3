"""The hand-written options of the benchmark on a CPU."""

from __future__ import annotations

import pytest
import torch
from rival_options import OPTIONS, options_of

from .rivalry import Nested
from .rivalry import nested_inputs as inputs

NEEDS = {"ONNX Runtime": "onnxruntime", "OpenVINO": "openvino", "bf16 OpenVINO": "openvino"}

QUICK = ("eager", "channels_last", "OpenVINO")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS["cpu"]],
)
def test_an_option_returns_what_the_model_does(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    call = OPTIONS["cpu"][name](Nested().eval(), (inputs(1), {}))
    first = call(*inputs(2))
    kept = first["scores"].clone()
    call(*inputs(3))
    with torch.no_grad():
        expected = Nested().eval()(*inputs(2))
    off = 0.05 if name.startswith("bf16") else 1e-5
    torch.testing.assert_close(first, expected, rtol=off, atol=off)
    assert torch.equal(first["scores"], kept)


def test_options_keep_to_the_precision_class():
    assert "bf16 OpenVINO" not in options_of("cpu", "same")
    assert options_of("cpu", "bf16") == list(OPTIONS["cpu"])
