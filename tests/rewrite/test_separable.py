"""Pointwise and depthwise convolutions and what one operator takes along with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.conv.rewrite import rewrite
from steadytorch.workload.workload import Workload

from .separating import SEPARABLE, fused, made, shown, stochastic_depth

torch.fx.wrap("stochastic_depth")

ACTIVATIONS = {
    "ReLU": (lambda net, x: net.relu(net.point(x)), "relu"),
    "ReLU in place": (lambda net, x: net.relu_(net.point(x)), "relu"),
    "SiLU": (lambda net, x: net.silu(net.point(x)), "silu"),
    "F.silu": (lambda net, x: F.silu(net.point(x), inplace=True), "silu"),
    "F.hardswish": (lambda net, x: F.hardswish(net.point(x)), "hardswish"),
    "F.hardsigmoid": (lambda net, x: F.hardsigmoid(net.point(x), True), "hardsigmoid"),
    "F.gelu": (lambda net, x: F.gelu(net.point(x)), "gelu"),
    "F.gelu with tanh": (lambda net, x: F.gelu(net.point(x), approximate="tanh"), "gelu_tanh"),
    "F.relu6": (lambda net, x: F.relu6(net.point(x)), "relu6"),
    "torch.relu_": (lambda net, x: torch.relu_(net.point(x)), "relu"),
    "torch.sigmoid": (lambda net, x: torch.sigmoid(net.point(x)), "sigmoid"),
    "sigmoid as a method": (lambda net, x: net.point(x).sigmoid(), "sigmoid"),
    "relu as a method in place": (lambda net, x: net.point(x).relu_(), "relu"),
    "through layers that do nothing": (
        lambda net, x: net.silu(net.dropout(net.same(net.point(x)))),
        "silu",
    ),
    "through batch norm": (lambda net, x: net.relu_(net.norm(net.point(x))), "relu"),
    "read by several": (lambda net, x: (y := net.relu_(net.point(x))) + y.flip(0), "relu"),
}


@pytest.mark.parametrize(("forward", "name"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_pointwise_convolution_takes_its_activation_along(forward, name):
    assert fused(made(forward)) == [f"pointwise {name}"]


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *((nn.ReLU, "relu"), (nn.ReLU6, "relu6"), (nn.SiLU, "silu"), (nn.Sigmoid, "sigmoid")),
        *((nn.Hardswish, "hardswish"), (nn.Hardsigmoid, "hardsigmoid"), (nn.GELU, "gelu")),
        (lambda: nn.GELU("tanh"), "gelu_tanh"),
    ],
)
def test_every_activation_is_known_as_a_layer(layer, name):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), layer(), nn.Conv2d(4, 2, 1))
    model = nn.Sequential(model, layer()).double().eval()
    workload = Workload(model, torch.randn(1, 4, 5, 5).double())
    assert fused(workload) == [f"depthwise {name}", f"pointwise {name}"]


DEPTHWISE = {
    "with its activation": (lambda net, x: net.silu(net.deep(x)), "depthwise silu"),
    "without": (lambda net, x: net.mish(net.deep(x)), "depthwise"),
    "before a sum": (lambda net, x: net.deep(x) + net.strided(x)[..., :1, :1], "depthwise"),
    "its result read by several": (lambda net, x: net.relu(y := net.deep(x)) + y, "depthwise"),
    "behind batch norm": (lambda net, x: net.relu_(net.norm(net.deep(x))), "depthwise relu"),
}


@pytest.mark.parametrize(("forward", "expected"), DEPTHWISE.values(), ids=DEPTHWISE)
def test_a_depthwise_convolution_is_always_replaced(forward, expected):
    assert fused(made(forward)) == [expected]


GATED = {
    "gate first": lambda net, x: net.point(net.gate(x) * x),
    "gate last": lambda net, x: net.point(x * net.gate(x)),
    "torch.mul": lambda net, x: net.point(torch.mul(x, net.gate(x))),
    "as a method": lambda net, x: net.point(x.mul(net.gate(x))),
    "of means": lambda net, x: net.point(x * net.excite(net.squeeze(x.mean((2, 3), True))).relu()),
}


@pytest.mark.parametrize("forward", GATED.values(), ids=GATED)
def test_a_gate_before_a_pointwise_convolution_goes_into_it(forward):
    assert fused(made(forward)) == ["pointwise gate"]


NOT_GATED = {
    "the product is read by others": lambda net, x: net.relu(net.point(y := x * net.gate(x))) + y,
    "in place": lambda net, x: net.relu(net.point((x * 2).mul_(net.gate(x)))),
    "of one pixel each": lambda net, x: net.relu(net.point(x * net.relu(net.one(x)))),
    "of another batch": lambda net, x: net.relu(net.point(x * net.gate(x[:1]))),
    "a parameter for all images": lambda net, x: net.relu(net.point(x * net.row)),
    "of one channel": lambda net, x: net.relu(net.point(x * net.one(net.gate(x)))),
    "a number": lambda net, x: net.relu(net.point(x * 2.0)),
    "with itself": lambda net, x: net.relu(net.point(x * x)),
    "before a depthwise one": lambda net, x: net.relu(net.deep(x * net.gate(x))),
}


@pytest.mark.parametrize("forward", NOT_GATED.values(), ids=NOT_GATED)
def test_what_is_no_gate_stays_a_product(forward):
    found = fused(made(forward))
    assert found
    assert not any("gate" in words for words in found)


def test_a_factor_that_is_written_to_before_the_convolution_stays_outside():
    def forward(net, x):
        y, gate = x * 2, net.gate(x)
        product = y * gate
        y.mul_(3)
        return net.relu(net.point(product)) + y

    assert fused(made(forward)) == ["pointwise relu"]


SUMMED = {
    "input last": lambda net, x: net.point(x) + x,
    "input first": lambda net, x: x + net.point(x),
    "torch.add": lambda net, x: torch.add(net.point(x), x),
    "as a method": lambda net, x: net.point(x).add(x),
    "in place": lambda net, x: _iadd(net.point(x), x),
    "in place, as a method": lambda net, x: net.point(x).add_(x),
    "what is added comes later": lambda net, x: net.point(x) + net.gelu(x),
    "behind batch norm": lambda net, x: net.norm(net.point(x)) + x,
    "before an activation": lambda net, x: net.relu(net.point(x) + x),
    "of two": lambda net, x: net.point(x) + net.point2(x),
    "behind stochastic depth": lambda net, x: (
        stochastic_depth(net.norm(net.point(x)), 0.5, "row", net.training) + x
    ),
}


def _iadd(x, y):
    x += y
    return x


@pytest.mark.parametrize("forward", SUMMED.values(), ids=SUMMED)
def test_a_sum_behind_a_pointwise_convolution_goes_into_it(forward):
    assert fused(made(forward)) == ["pointwise sum"]


def test_gate_and_sum_go_together_and_an_activation_comes_before_a_sum():
    assert fused(made(lambda net, x: net.point(net.gate(x) * x) + x)) == ["pointwise gate sum"]
    assert fused(made(lambda net, x: net.silu(net.point(x)) + x)) == ["pointwise silu"]


NOT_SUMMED = {
    "one for all images": lambda net, x: net.point(x) + net.row,
    "of one pixel": lambda net, x: net.point(x) + net.gate(x),
    "of one channel": lambda net, x: net.point(x) + net.one(x),
    "of a smaller result": lambda net, x: net.point(net.gate(x) + net.row) + x,
    "a number": lambda net, x: net.point(x) + 1.0,
    "with itself": lambda net, x: (y := net.point(x)) + y,
    "scaled": lambda net, x: torch.add(net.point(x), x, alpha=2),
    "read by others": lambda net, x: (y := net.point(x)) + x + y.flip(0),
    "written into the other one": lambda net, x: (y := x * 2).add_(net.point(x)) + y,
    "of another type": lambda net, x: net.point(x) + x.float(),
    "training of depth": lambda net, x: stochastic_depth(net.point(x), 0.0, "row", True) + x,
}


@pytest.mark.parametrize("forward", NOT_SUMMED.values(), ids=NOT_SUMMED)
def test_what_is_no_sum_of_equals_is_left_alone(forward):
    assert fused(made(forward)) == []


def test_what_is_added_is_read_before_somebody_writes_to_it():
    def forward(net, x):
        y, z = net.point(x), x * 2
        total = z + 0
        z.mul_(3)
        return (y + total) * net.silu(z)

    def between(net, x):
        y = x * 1
        z = net.point(y)
        y.mul_(3)
        return z + y

    assert fused(made(between)) == []
    assert fused(made(forward)) == []


def test_what_a_convolution_reads_is_not_overwritten_before_its_activation():
    def forward(net, x):
        y = x * 1
        z = net.point(y)
        F.relu(y, True)
        return net.silu(z) + y

    assert fused(made(forward)) == []


@torch.library.custom_op("steadytorch_tests::triple", mutates_args={"x"})
def triple(x: torch.Tensor) -> None:
    x.mul_(3)


WRITES = {
    "an operator of the caller's": triple,
    "one overload of PyTorch's": lambda x: torch.ops.aten.mul_.Scalar(x, 3),
    "all overloads of PyTorch's": lambda x: torch.ops.aten.mul_(x, 3),
    "a special method": lambda x: x.__imul__(3),
    "a special method that sets": lambda x: x.__setitem__(0, 3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_whoever_writes_to_what_a_convolution_reads(write):
    def forward(net, x):
        y = x * 1
        z = net.point(y)
        write(y)
        return net.silu(z) + y

    assert fused(made(forward)) == []


def test_an_operator_that_only_computes_is_no_writer():
    def forward(net, x):
        z = net.point(x)
        return torch.ops.aten.tanh.default(x) * net.silu(z)

    assert fused(made(forward)) == ["pointwise silu"]


REFUSED = {
    "alone": lambda net, x: net.point(x),
    "the result is read by others": lambda net, x: net.relu(y := net.point(x)) + y.flip(0),
    "another activation": lambda net, x: net.mish(net.point(x)),
    "strided": lambda net, x: net.relu(net.strided(x)),
    "padded": lambda net, x: net.relu(net.padded(x)),
    "grouped": lambda net, x: net.relu(net.grouped(x)),
    "two results for each channel": lambda net, x: net.relu(net.multiplied(x)),
    "padded with a mirror": lambda net, x: net.relu(net.mirrored(x)),
    "padded by name": lambda net, x: net.relu(net.same_size(x)),
    "a function": lambda net, x: net.relu(F.conv2d(x, net.point.weight)),
    "on images of one pixel": lambda net, x: x * net.gate(x),
    "one image that is no batch": lambda net, x: net.relu(net.point(x[0])),
    "called by name": lambda net, x: net.relu(net.point(input=x)),
}


@pytest.mark.parametrize("forward", REFUSED.values(), ids=REFUSED)
def test_other_convolutions_stay_as_they_are(forward):
    assert fused(made(forward)) == []


@pytest.mark.parametrize("layer", ["point", "silu"])
def test_hooked_layers_are_left_alone(layer):
    workload = made(lambda net, x: net.silu(net.point(x)))
    getattr(workload.model, layer).register_forward_hook(lambda module, args, output: output * 2)
    assert fused(workload) == []


def test_a_gate_may_come_from_a_hooked_layer():
    workload = made(lambda net, x: net.point((y := x * 2) * net.silu(y.mean((2, 3), True))))
    workload.model.silu.register_forward_hook(lambda module, args, output: output + 1)
    assert fused(workload) == ["pointwise gate"]


def test_batch_norm_in_training_is_not_folded():
    workload = made(lambda net, x: net.relu(net.norm(net.point(x))) + net.relu(net.deep(x)).sum())
    workload.model.norm.train()
    statistics = workload.model.norm.running_mean.clone()
    with SEPARABLE.applied(workload) as rewritten:
        assert shown(rewritten.model) == ["depthwise relu"]
        assert isinstance(rewritten.model.norm, nn.BatchNorm2d)
    assert torch.equal(workload.model.norm.running_mean, statistics)


def test_a_layer_that_is_called_twice_is_fused_twice_and_keeps_its_batch_norm():
    twice = made(lambda net, x: net.silu(net.point(net.relu(net.point(x)))))
    assert fused(twice) == ["pointwise relu", "pointwise silu"]
    normed = made(lambda net, x: net.relu(net.norm(net.point(net.relu(net.point(x))))))
    assert fused(normed) == ["pointwise relu"]


def test_all_batch_norms_are_folded():
    workload = made(lambda net, x: net.norm(net.grouped(net.silu(net.point(x)))))
    before = copy.deepcopy(workload.model.state_dict())
    assert fused(workload) == ["pointwise silu"]
    with SEPARABLE.applied(workload) as rewritten:
        assert isinstance(rewritten.model.norm, nn.Identity)
    after = workload.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_what_goes_to_a_max_pooling_is_left_to_it():
    def forward(net, x):
        return F.max_pool2d(net.relu(net.deep(x)), 2).sum() + net.silu(net.point(x))

    assert fused(made(forward)) == ["depthwise", "pointwise silu"]


def test_engines_see_what_a_function_writes_in_place_by_its_second_argument():
    def forward(net, x):
        y = x * 1
        z = net.point(y)
        F.relu(y, True)
        return torch.relu(z) + y

    workload = made(forward)
    (x,) = workload.inputs
    with torch.no_grad():
        engined = rewrite(torch.fx.symbolic_trace(workload.model), (x,), {})
        torch.testing.assert_close(engined(x), workload.model(x))
