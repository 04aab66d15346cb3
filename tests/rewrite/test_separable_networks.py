"""Separable convolutions in whole networks, and beside other transforms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from steadytorch.conv.module import engine_convolutions
from steadytorch.kernels.depthwise_conv import depthwise_conv2d
from steadytorch.kernels.pointwise_conv import pointwise_conv2d
from steadytorch.rewrite.tracing import traced
from steadytorch.transforms.base import Applicable, NotApplicable, applied_in_order
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.cudnn_engines import rewritten_model
from steadytorch.transforms.fold_batch_norm import FoldBatchNorm
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

from .separating import SEPARABLE, fused, made, shown, stochastic_depth

torch.fx.wrap("stochastic_depth")


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
    expected = ["thin silu", *block, f"{gated} sum", *block, gated, *block, f"{gated} sum"]
    assert fused(workload) == expected


def test_a_network_as_densenet_has_its_pointwise_convolutions_fused():
    torch.manual_seed(0)
    model = randomised(nn.Sequential(DenseLayer(6), DenseLayer(10))).double()
    assert fused(Workload(model, torch.randn(2, 6, 9, 9).double())) == ["pointwise relu"] * 2


MOBILE = {
    # The first one and all fifteen depthwise ones; fourteen blocks widen, and a last convolution
    # does; ten blocks are residual, eight gated, five of these both.
    "thin hardswish": 1,
    "depthwise relu": 6,
    "depthwise hardswish": 9,
    "pointwise relu": 5,
    "pointwise hardswish": 10,
    "pointwise sum": 5,
    "pointwise gate": 3,
    "pointwise gate sum": 5,
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.sampled(every=2)
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
    # Two per gate, and two without an adjacent operation.
    assert left.count(nn.Conv2d) == 2 * 8 + 2
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
        # Two per gate.
        assert len(engine_convolutions(engined)) == 6
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
    with pytest.raises(ValueError, match="both fuse sums"):
        FusedKernels.Parameters(residual=True, separable=True)


def test_it_applies_where_there_is_something_to_fuse(gpu):
    assert SEPARABLE.applies_to(inverted(), gpu) == Applicable()
    answer = SEPARABLE.applies_to(made(lambda net, x: net.relu(net.grouped(net.point(x)))), gpu)
    assert isinstance(answer, NotApplicable)
    assert "no pointwise, depthwise or few-channel convolution" in answer.reason


def test_results_that_depend_on_values_are_refused(gpu):
    workload = made(lambda net, x: net.relu(net.point(x)).masked_select(x > 0))
    answer = SEPARABLE.applies_to(workload, gpu)
    assert isinstance(answer, NotApplicable)
    assert answer.reason.startswith("torch.fx cannot trace the model: ")


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
