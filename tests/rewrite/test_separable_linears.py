"""Linears and the activation that one operator takes along with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.kernels.activated_linear import activated_linear
from steadytorch.rewrite.tracing import traced
from steadytorch.transforms.base import Applicable, NotApplicable, applied_in_order
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.workload.workload import Workload

from .separating import SEPARABLE, fused, made, shown

ACTIVATIONS = {
    "GELU": (lambda net, x: net.gelu(net.wide(x)), "gelu"),
    "F.gelu": (lambda net, x: F.gelu(net.wide(x)), "gelu"),
    "F.gelu by name": (lambda net, x: F.gelu(net.wide(x), approximate="none"), "gelu"),
    "F.gelu with tanh": (lambda net, x: F.gelu(net.wide(x), approximate="tanh"), "gelu_tanh"),
    "ReLU in place": (lambda net, x: net.relu_(net.wide(x)), "relu"),
    "F.silu": (lambda net, x: F.silu(net.wide(x), inplace=True), "silu"),
    "sigmoid as a method": (lambda net, x: net.wide(x).sigmoid(), "sigmoid"),
    "through layers that do nothing": (lambda net, x: net.silu(net.dropout(net.wide(x))), "silu"),
    "of a matrix": (lambda net, x: net.gelu(net.wide(x.flatten(0, 2))), "gelu"),
    "of a permuted image": (lambda net, x: net.gelu(net.wide(x.permute(0, 2, 1, 3))), "gelu"),
    "read by several": (lambda net, x: (y := net.gelu(net.wide(x))) + y.flip(0), "gelu"),
    "the first of two": (lambda net, x: net.back(net.gelu(net.wide(x))) + x, "gelu"),
    "without a bias": (lambda net, x: net.gelu(net.back(x[..., :1].expand(2, 6, 8, 12))), "gelu"),
}


@pytest.mark.parametrize(("forward", "name"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_linear_takes_its_activation_along(forward, name):
    assert fused(made(forward)) == [f"linear {name}"]


def overwritten(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = net.wide(y)
    y.mul_(3)
    return net.gelu(z).sum() + y


REFUSED = {
    "alone": lambda net, x: net.wide(x),
    "with a sum": lambda net, x: net.wide(x) + x[..., :1],
    "the result is read by others": lambda net, x: net.gelu(y := net.wide(x)) + y.flip(0),
    "another activation": lambda net, x: net.mish(net.wide(x)),
    "a function": lambda net, x: net.gelu(F.linear(x, net.wide.weight)),
    "called by name": lambda net, x: net.gelu(net.wide(input=x)),
    "of as few rows as multiplications": lambda net, x: net.gelu(net.wide(x[0, 0, :4])),
    "of one row": lambda net, x: net.gelu(net.wide(x[0, 0, 0])),
    "its input is overwritten first": overwritten,
}


@pytest.mark.parametrize("forward", REFUSED.values(), ids=REFUSED)
def test_other_linears_stay_as_they_are(forward):
    assert fused(made(forward)) == []


@pytest.mark.parametrize("layer", ["wide", "gelu"])
def test_hooked_layers_are_left_alone(layer):
    workload = made(lambda net, x: net.gelu(net.wide(x)))
    getattr(workload.model, layer).register_forward_hook(lambda module, args, output: output * 2)
    assert fused(workload) == []


@pytest.mark.parametrize("name", ["wide", "point"])
def test_a_layer_whose_forward_was_replaced_computes_that(name):
    made_of = made(lambda net, x: net.gelu(net.wide(x)) + F.silu(net.point(x)).mean())
    layer, before = getattr(made_of.model, name), getattr(made_of.model, name).forward
    layer.forward = lambda x: before(x) + 100
    expected = made_of.model(*made_of.inputs)
    with SEPARABLE.applied(made_of) as changed:
        torch.testing.assert_close(changed.model(*made_of.inputs), expected)


def test_a_model_whose_own_forward_was_replaced_is_left_alone(gpu):
    made_of = made(lambda net, x: net.gelu(net.wide(x)))
    before = made_of.model.forward
    made_of.model.forward = lambda x: before(x) + 100
    refused = SEPARABLE.applies_to(made_of, gpu)
    assert isinstance(refused, NotApplicable)
    assert "forward was replaced" in refused.reason


class Doubled(torch.Tensor):
    """A weight subclass that overrides the Linear operation."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is F.linear else result


def test_weights_of_other_types_are_left_alone():
    net = made(lambda net, x: net.gelu(net.wide(x)))
    weight = net.model.wide.weight.detach().as_subclass(Doubled)
    net.model.wide.weight = nn.Parameter(weight)
    assert type(net.model.wide.weight) is Doubled
    assert fused(net) == []


def test_a_subclass_of_linear_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    workload = made(lambda net, x: net.gelu(net.wide(x)))
    workload.model.wide = Doubled(8, 12).double()
    assert fused(workload) == []


def test_dropout_that_trains_stays_between():
    workload = made(lambda net, x: net.gelu(net.dropout(net.wide(x))))
    workload.model.dropout.train()
    with SEPARABLE.applied(workload) as rewritten:
        assert shown(rewritten.model) == []


def widened(channels: int, rows: int) -> Workload:
    """Linears as in a transformer, on the meta device."""
    with torch.device("meta"):
        layers = nn.Linear(channels, 4 * channels), nn.GELU()
        return Workload(nn.Sequential(*layers).eval(), torch.empty(rows, channels))


@pytest.mark.parametrize(
    ("channels", "rows", "is_taken"),
    [
        *((96, 100352, True), (192, 25088, True), (384, 6272, False), (768, 1568, False)),
        *((96, 3136, True), (192, 784, True), (96, 77, True), (96, 76, False), (768, 1, False)),
    ],
)
def test_it_is_taken_where_its_rows_bound_it(channels, rows, is_taken, gpu):
    workload = widened(channels, rows)
    with SEPARABLE.applied(workload) as rewritten:
        assert shown(rewritten.model) == ["linear gelu"] * is_taken
    answer = SEPARABLE.applies_to(workload, gpu)
    assert isinstance(answer, Applicable if is_taken else NotApplicable)


class Block(nn.Module):
    """As ConvNeXt's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide, self.gelu = nn.Linear(channels, 4 * channels), nn.GELU()
        self.back = nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.back(self.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return self.layer_scale * y + x


def convnext() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.Sequential(Block(8), Block(8)).eval(), torch.randn(2, 8, 9, 9))


def test_a_network_as_convnext_is_fused_but_for_its_second_linears():
    workload = convnext()
    doubled = Workload(workload.model.double(), workload.inputs[0].double())
    assert fused(doubled) == ["depthwise", "linear gelu"] * 2


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
def test_it_goes_with_lower_types_and_layouts(last):
    workload = convnext()
    half = CastWeights(CastWeights.Parameters("bf16"))
    stack = [SEPARABLE, half, *[ChannelsLast()] * last]
    with torch.no_grad(), applied_in_order(stack, workload) as rewritten:
        found = rewritten.model(*rewritten.inputs)
        torch.testing.assert_close(found, workload.model(*workload.inputs), rtol=0.1, atol=0.1)


def test_weights_are_shared_and_keep_their_names():
    workload = convnext()
    with SEPARABLE.applied(workload) as rewritten:
        weights = dict(rewritten.model.named_parameters())
        assert weights["0.wide.weight"] is workload.model[0].wide.weight
        assert set(weights) == set(dict(workload.model.named_parameters()))


def test_its_graph_can_be_traced_again():
    with SEPARABLE.applied(convnext()) as rewritten:
        _, graph = traced(rewritten)
        assert sum(node.target is activated_linear for node in graph.nodes) == 2
