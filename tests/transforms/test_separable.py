"""Pointwise and depthwise convolutions and what one operator takes along with them."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.conv.module import engine_convolutions
from steadytorch.conv.rewrite import rewrite
from steadytorch.kernels.depthwise_conv import depthwise_conv2d
from steadytorch.kernels.pointwise_conv import pointwise_conv2d
from steadytorch.transforms.base import Applicable, NotApplicable, applied_in_order
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.cudnn_engines import rewritten_model
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.transforms.tracing import traced
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

SEPARABLE = FusedKernels(FusedKernels.Parameters(separable=True))
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@torch.fx.wrap
def stochastic_depth(input, p, mode, training=True):
    """As torchvision's, which is not among what tests need."""
    if not training or p == 0.0:
        return input
    return input * torch.empty(input.shape[0], 1, 1, 1).bernoulli_(1 - p)


stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"


class Net(nn.Module):
    """Layers to choose from, for images of six channels; `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.point, self.point2 = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1, bias=False)
        self.deep = nn.Conv2d(6, 6, 3, 2, 2, 2, groups=6)
        self.strided, self.padded = nn.Conv2d(6, 6, 1, 2), nn.Conv2d(6, 6, 1, padding=1)
        self.grouped = nn.Conv2d(6, 6, 3, 1, 1, groups=3)
        self.multiplied = nn.Conv2d(6, 12, 3, 1, 1, groups=6)
        self.mirrored = nn.Conv2d(6, 6, 3, 1, 1, groups=6, padding_mode="reflect")
        self.same_size = nn.Conv2d(6, 6, 3, padding="same", groups=6)
        self.norm, self.same = nn.BatchNorm2d(6), nn.Identity()
        self.relu, self.relu_, self.silu = nn.ReLU(), nn.ReLU(True), nn.SiLU()
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(0.5)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.one = nn.Conv2d(6, 1, 1)
        self.row = nn.Parameter(torch.randn(1, 6, 1, 1))
        self.run = forward
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        y = self.excite(self.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return torch.sigmoid(y)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return self.run(self, x) * scale


def made(forward: Any, *, batch: int = 2) -> Workload:
    torch.manual_seed(0)
    return Workload(Net(forward).double().eval(), torch.randn(batch, 6, 8, 8).double())


def fused_nodes(model: Any) -> list[torch.fx.Node]:
    operators = (pointwise_conv2d, depthwise_conv2d)
    return [node for node in model.graph.nodes if node.target in operators]


def shown(model: Any) -> list[str]:
    """Each fused convolution of a graph in a few words."""
    found = []
    for node in fused_nodes(model):
        if node.target is depthwise_conv2d:
            found.append(" ".join(["depthwise", node.args[6]]).strip())
            continue
        *_, activation, gate, other = node.args
        with_gate, with_sum = "gate" * (gate is not None), "sum" * (other is not None)
        words = ["pointwise", with_gate, activation, with_sum]
        found.append(" ".join(word for word in words if word))
    return found


def fused(workload: Workload) -> list[str]:
    """What is fused, once results are seen to be as of the model."""
    with torch.no_grad(), SEPARABLE.applied(workload) as rewritten:
        inputs = [x.clone() for x in workload.inputs]
        found = rewritten.model(*inputs)
        torch.testing.assert_close(found, workload.model(*workload.inputs), **CLOSE)
        rewritten.model.graph.lint()
        return shown(rewritten.model)


ACTIVATIONS = {
    "ReLU": (lambda net, x: net.relu(net.point(x)), "relu"),
    "ReLU in place": (lambda net, x: net.relu_(net.point(x)), "relu"),
    "SiLU": (lambda net, x: net.silu(net.point(x)), "silu"),
    "F.silu": (lambda net, x: F.silu(net.point(x), inplace=True), "silu"),
    "F.hardswish": (lambda net, x: F.hardswish(net.point(x)), "hardswish"),
    "F.hardsigmoid": (lambda net, x: F.hardsigmoid(net.point(x), True), "hardsigmoid"),
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
        *((nn.Hardswish, "hardswish"), (nn.Hardsigmoid, "hardsigmoid")),
    ],
)
def test_every_activation_is_known_as_a_layer(layer, name):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), layer(), nn.Conv2d(4, 2, 1))
    model = nn.Sequential(model, layer()).double().eval()
    workload = Workload(model, torch.randn(1, 4, 5, 5).double())
    assert fused(workload) == [f"depthwise {name}", f"pointwise {name}"]


DEPTHWISE = {
    "with its activation": (lambda net, x: net.silu(net.deep(x)), "depthwise silu"),
    "without": (lambda net, x: net.gelu(net.deep(x)), "depthwise"),
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
    "another activation": lambda net, x: net.gelu(net.point(x)),
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


class Gate(nn.Module):
    """Squeeze-and-excitation as of torchvision."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool, self.scale_activation = nn.AdaptiveAvgPool2d(1), nn.Sigmoid()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.activation = nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


class StochasticDepth(nn.Module):
    """As of torchvision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return stochastic_depth(x, 0.2, "row", self.training)


def normed(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> Any:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Inverted(nn.Module):
    """A block as of EfficientNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        expand = [*normed(inputs, wide), nn.SiLU(inplace=True)]
        filtered = [*normed(wide, wide, 5, stride, wide), nn.SiLU(inplace=True)]
        layers = [*expand, *filtered, Gate(wide, 2), *normed(wide, outputs)]
        self.block, self.depth = nn.Sequential(*layers), StochasticDepth()
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.block(x)
        if self.residual:
            result = self.depth(result)
            result += x
        return result


class DenseLayer(nn.Module):
    """A layer as of DenseNet."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 8, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(self.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu(self.norm2(y)))], 1)


def randomised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def inverted() -> Workload:
    torch.manual_seed(0)
    stem = [*normed(3, 8, 3, 2), nn.SiLU(inplace=True)]
    model = nn.Sequential(*stem, Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1))
    return Workload(randomised(model), torch.randn(2, 3, 33, 40))


def test_a_network_as_efficientnet_is_fused_wholly():
    workload = inverted()
    workload = Workload(workload.model.double(), workload.inputs[0].double())
    block = ["pointwise silu", "depthwise silu"]
    gated = "pointwise gate"
    expected = [*block, f"{gated} sum", *block, gated, *block, f"{gated} sum"]
    assert fused(workload) == expected


def test_a_network_as_densenet_has_its_pointwise_convolutions_fused():
    torch.manual_seed(0)
    model = randomised(nn.Sequential(DenseLayer(6), DenseLayer(10))).double()
    assert fused(Workload(model, torch.randn(2, 6, 9, 9).double())) == ["pointwise relu"] * 2


MOBILE = {
    # All fifteen depthwise ones; fourteen blocks widen, and a last convolution does; ten blocks
    # are residual, eight gated, five of these both.
    "depthwise relu": 6,
    "depthwise hardswish": 9,
    "pointwise relu": 5,
    "pointwise hardswish": 10,
    "pointwise sum": 5,
    "pointwise gate": 3,
    "pointwise gate sum": 5,
}


@pytest.mark.parametrize("batch", [1, 2])
def test_mobilenet_keeps_its_results(batch):
    workload = load_workload("mobilenet_v3_large", batch=batch)
    x = workload.inputs[0][..., :64, :64]
    model = randomised(workload.model)
    for dtype, bound in ((torch.float32, 5e-6), (torch.float64, 1e-13)):
        model = model.to(dtype)
        cast = Workload(model, x.to(dtype))
        with torch.no_grad(), SEPARABLE.applied(cast) as rewritten:
            found, expected = rewritten.model(*cast.inputs), model(*cast.inputs)
            assert Counter(shown(rewritten.model)) == MOBILE
            left = [type(rewritten.model.get_submodule(n.target)) for n in _layers(rewritten.model)]
        assert (found - expected).norm() < bound * expected.norm()
    # The first one, two of each gate, and three that nothing stands around.
    assert left.count(nn.Conv2d) == 1 + 2 * 8 + 2
    assert nn.BatchNorm2d not in left


def _layers(model: Any) -> list[torch.fx.Node]:
    return [node for node in model.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("folded", [False, True], ids=["as it is", "folded before"])
def test_it_goes_with_lower_types_layouts_and_folded_norms(last, folded):
    workload = inverted()
    half = CastWeights(CastWeights.Parameters("bf16"))
    stack = [*[FoldBatchNorm()] * folded, SEPARABLE, half, *[ChannelsLast()] * last]
    with torch.no_grad(), applied_in_order(stack, workload) as rewritten:
        found = rewritten.model(*rewritten.inputs)
        torch.testing.assert_close(found, workload.model(*workload.inputs), rtol=0.1, atol=0.1)


def test_weights_of_depthwise_convolutions_are_laid_out_once():
    workload = inverted()
    stack = [SEPARABLE, CastWeights(CastWeights.Parameters("bf16")), ChannelsLast()]
    with applied_in_order(stack, workload) as rewritten:
        weights = [weight for weight in rewritten.model.parameters() if weight.shape[2:] == (5, 5)]
        assert len(weights) == 3
        assert all(weight.permute(2, 3, 1, 0).is_contiguous() for weight in weights)
        assert all(isinstance(weight, nn.Parameter) for weight in weights)
    assert all(weight.is_contiguous() for weight in workload.model.parameters())


def test_it_takes_16_bits_only_where_it_is_for_separable_convolutions():
    assert SEPARABLE.takes_half_only
    assert not FusedKernels().takes_half_only


def test_engines_take_what_is_left():
    workload = inverted()
    with torch.no_grad(), SEPARABLE.applied(workload) as rewritten:
        engined = rewritten_model(rewritten)
        torch.testing.assert_close(engined(*workload.inputs), workload.model(*workload.inputs))
        # The stem, and two of each gate.
        assert len(engine_convolutions(engined)) == 7
        assert shown(engined) == shown(rewritten.model)


def test_its_graph_can_be_traced_again():
    with SEPARABLE.applied(inverted()) as rewritten:
        _, graph = traced(rewritten)
        assert sum(node.target in (pointwise_conv2d, depthwise_conv2d) for node in graph.nodes) == 9


def test_a_stem_goes_with_it():
    torch.manual_seed(0)
    stem = [*normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    model = randomised(nn.Sequential(*stem, nn.Conv2d(64, 8, 1), nn.ReLU()))
    workload = Workload(model, torch.randn(1, 3, 33, 40))
    both = FusedKernels(FusedKernels.Parameters(stem=True, separable=True))
    with torch.no_grad(), both.applied(workload) as rewritten:
        functions = [n.target.__name__ for n in rewritten.model.graph.nodes if callable(n.target)]
        assert functions == ["conv_relu_max_pool2d", "pointwise_conv2d"]
        torch.testing.assert_close(rewritten.model(*workload.inputs), model(*workload.inputs))


def test_sums_are_not_taken_twice():
    with pytest.raises(ValueError, match="both take sums"):
        FusedKernels.Parameters(residual=True, separable=True)


def test_it_applies_where_there_is_something_to_fuse(gpu):
    assert SEPARABLE.applies_to(inverted(), gpu) == Applicable()
    answer = SEPARABLE.applies_to(made(lambda net, x: net.relu(net.grouped(net.point(x)))), gpu)
    assert isinstance(answer, NotApplicable)
    assert "no pointwise or depthwise convolution" in answer.reason


def test_results_that_depend_on_values_are_refused(gpu):
    workload = made(lambda net, x: net.relu(net.point(x)).masked_select(x > 0))
    answer = SEPARABLE.applies_to(workload, gpu)
    assert isinstance(answer, NotApplicable)
    assert answer.reason.startswith("the model cannot be traced by torch.fx: ")


def test_optional_arguments_are_bound_as_the_model_binds_them(gpu):
    workload = made(lambda net, x: net.relu(net.point(x)))
    (x,) = workload.inputs
    for given in (Workload(workload.model, (x, 2.0)), Workload(workload.model, {"x": x})):
        assert SEPARABLE.applies_to(given, gpu) == Applicable()


def test_no_arithmetic_is_done_to_find_out(gpu):
    workload = made(lambda net, x: net.relu(net.norm(net.point(x))))
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not result.is_meta:
                calls.append(func)
            return result

    with Watch():
        assert SEPARABLE.applies_to(workload, gpu) == Applicable()
    assert not any("conv" in str(call) for call in calls)


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
