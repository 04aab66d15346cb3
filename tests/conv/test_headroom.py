from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from steadytorch.conv.headroom import MOST, beyond_fp16
from steadytorch.conv.module import engine_convolutions
from steadytorch.conv.rewrite import rewrite


def network(first=1.0, second=1.0):
    """Two convolutions with weights of one, so that results are sums of inputs."""
    layers = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 4, 1, bias=False)).eval()
    for layer, value in zip(layers, (first, second), strict=True):
        nn.init.constant_(layer.weight, value)
    return rewrite(fx.symbolic_trace(layers), (torch.ones(1, 1, 2, 2),), {})


def beyond(model, value):
    """By the number of channels that they give."""
    found = beyond_fp16(model, lambda: model(torch.full((1, 1, 2, 2), value)))
    problems = [c.problem for c in engine_convolutions(model) if c.problem]
    return [p.output[1] for p in problems if p.key in found]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, []), (0.6 * MOST, [4]), (1.2 * MOST, [2, 4]), (float("nan"), [2, 4])],
)
def test_inputs_and_results_are_looked_at(value, expected):
    assert beyond(network(), value) == expected


def test_so_are_weights():
    assert beyond(network(second=2 * MOST), 0.0) == [4]


def test_nothing_is_left_on_the_model():
    model = network()
    beyond(model, 1.0)
    assert not any(each._forward_hooks for each in model.modules())
