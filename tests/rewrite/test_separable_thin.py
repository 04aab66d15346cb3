"""Convolutions of few channels, which take their activation along with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d
from steadytorch.kernels.small_channel_conv import thin_conv2d
from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.workload import Workload

from .separating import SEPARABLE, fused, fused_nodes

THIN = {
    "stride 2, SiLU": (nn.Conv2d(3, 6, 3, 2, 1), nn.SiLU(), ["thin silu"]),
    "one channel, uneven": (
        nn.Conv2d(1, 4, (3, 5), (1, 2), (0, 1), (2, 1)),
        nn.ReLU(),
        ["thin relu"],
    ),
    "GELU": (nn.Conv2d(3, 6, 3), nn.GELU(), ["thin gelu"]),
    "no bias": (nn.Conv2d(4, 6, 2, bias=False), nn.Hardswish(), ["thin hardswish"]),
    "single pixels, all of them": (nn.Conv2d(3, 6, 1), nn.ReLU(), ["pointwise relu"]),
    "single pixels, every other": (nn.Conv2d(3, 6, 1, 2), nn.ReLU(), []),
    "five channels": (nn.Conv2d(5, 6, 3), nn.ReLU(), []),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), []),
    "many outputs": (nn.Conv2d(3, 129, 3), nn.ReLU(), []),
    "many taps": (nn.Conv2d(3, 6, 10), nn.ReLU(), []),
    "padded by name": (nn.Conv2d(3, 6, 3, padding="same"), nn.ReLU(), []),
    "padded with a mirror": (nn.Conv2d(3, 6, 3, 1, 1, padding_mode="reflect"), nn.ReLU(), []),
    "another activation": (nn.Conv2d(3, 6, 3), nn.Mish(), []),
    "none": (nn.Conv2d(3, 6, 3), nn.Identity(), []),
    "behind batch norm": (
        nn.Conv2d(3, 6, 3),
        nn.Sequential(nn.BatchNorm2d(6), nn.SiLU()),
        ["thin silu"],
    ),
    "before a max-pooling": (nn.Conv2d(3, 6, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), []),
}


@pytest.mark.parametrize(("conv", "after", "expected"), THIN.values(), ids=THIN)
def test_a_convolution_of_few_channels_takes_its_activation_along(conv, after, expected):
    torch.manual_seed(0)
    other = nn.Sequential(nn.Conv2d(conv.out_channels, 2, 1), nn.ReLU())
    model = nn.Sequential(conv, after, other).double().eval()
    workload = Workload(model, torch.randn(2, conv.in_channels, 13, 12).double())
    assert fused(workload) == [*expected, "pointwise relu"]


class Branches(nn.Module):
    """One convolution before SiLU, and one before ReLU and max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.silu = nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU()
        self.right, self.relu, self.pool = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.silu(self.left(x)).sum() + self.pool(self.relu(self.right(x)))


@pytest.mark.parametrize("stem", [False, True])
def test_a_stem_is_left_to_its_own_operator(stem):
    torch.manual_seed(0)
    workload = Workload(Branches().eval(), torch.randn(1, 3, 33, 40))
    both = FusedKernels(FusedKernels.Parameters(stem=stem, separable=True))
    with torch.no_grad(), both.applied(workload) as rewritten:
        targets = [node.target for node in rewritten.model.graph.nodes]
        assert targets.count(thin_conv2d) == 1
        assert targets.count(conv_relu_max_pool2d) == stem
        torch.testing.assert_close(
            rewritten.model(*workload.inputs), workload.model(*workload.inputs)
        )


def test_its_weight_stays_as_it_lies():
    model = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU()).eval().to(memory_format=torch.channels_last)
    )
    with SEPARABLE.applied(Workload(model, torch.randn(1, 3, 9, 9))) as rewritten:
        (node,) = fused_nodes(rewritten.model)
        weight = rewritten.model.get_parameter(node.args[1].target)
        assert weight.data_ptr() == model[0].weight.data_ptr()


def test_what_is_written_to_before_the_activation_is_read_in_time():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            z = self.conv(y)
            y.mul_(3)
            return self.relu(z) + y

    assert fused(Workload(Net().double().eval(), torch.randn(1, 3, 9, 9).double())) == []


def test_it_applies_where_there_is_one(gpu):
    x = torch.randn(1, 3, 9, 9)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU())
    assert SEPARABLE.applies_to(Workload(model.eval(), x), gpu) == Applicable()
    answer = SEPARABLE.applies_to(Workload(nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), x), gpu)
    assert isinstance(answer, NotApplicable)
    assert "few-channel convolution" in answer.reason
