from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.rewrite.fusible import Layers
from steadytorch.rewrite.tracing import traced
from steadytorch.transforms.fold_batch_norm import foldable_pairs
from steadytorch.workload.workload import Workload


class Net(nn.Module):
    """Layers to choose from; `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.deep, self.bare = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, bias=False)
        self.relu, self.relu_, self.pool = nn.ReLU(), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.same = nn.Identity()
        self.run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def found(forward: Any, change: Any = lambda net: None) -> tuple[Layers, frozenset[str]]:
    net = Net(forward).eval()
    change(net)
    made = Workload(net, torch.randn(1, 3, 16, 16))
    return Layers(*traced(made)), frozenset(pair.batch_norm for pair in foldable_pairs(made))


def plain(net, x):
    return net.pool(net.relu(net.norm(net.conv(x))))


STEMS = {
    "layers": plain,
    "without a norm": lambda net, x: net.pool(net.relu_(net.conv(x))),
    "idle layers": lambda net, x: net.pool(net.relu(net.same(net.norm(net.conv(x))))),
    "functions": lambda net, x: F.max_pool2d(torch.relu(net.conv(x)), 3, 2, padding=1),
    "no padding": lambda net, x: F.max_pool2d(net.conv(x).relu_(), 3, 2, ceil_mode=True),
    "input read by others": lambda net, x: plain(net, x).sum() + x,
}
NO_STEMS = {
    "many channels": lambda net, x: net.pool(net.relu(net.deep(net.conv(x)))),
    "no pooling": lambda net, x: net.relu(net.norm(net.conv(x))),
    "another window": lambda net, x: F.max_pool2d(net.relu(net.conv(x)), 2, 2),
    "another step": lambda net, x: F.max_pool2d(net.relu(net.conv(x)), 3),
    "holes in the window": lambda net, x: F.max_pool2d(net.relu(net.conv(x)), 3, 2, 1, 2),
    "uneven padding": lambda net, x: F.max_pool2d(net.relu(net.conv(x)), 3, 2, (0, 1)),
    "read by others": lambda net, x: net.pool(net.relu(y := net.conv(x))).sum() + y,
    "the norm is read by others": lambda net, x: (
        net.pool(net.relu(y := net.norm(net.conv(x)))).sum() + y
    ),
    "the norm is called twice": lambda net, x: (
        plain(net, x).sum() + net.norm(net.deep(net.conv(x)))
    ),
}


@pytest.mark.parametrize("forward", STEMS.values(), ids=STEMS)
def test_stems_are_found(forward):
    layers, foldable = found(forward)
    (stem,) = layers.stems(foldable)
    assert stem.conv.target == "conv"


@pytest.mark.parametrize("forward", NO_STEMS.values(), ids=NO_STEMS)
def test_what_is_no_stem_is_left(forward):
    layers, foldable = found(forward)
    assert list(layers.stems(foldable)) == []


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(3, 3, 3, groups=3),
        nn.Conv2d(3, 4, 1),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
        type("Own", (nn.Conv2d,), {})(3, 4, 3),
    ],
    ids=["same", "circular", "holes", "groups", "one pixel", "parametrised", "subclass"],
)
def test_other_convolutions_are_left(conv):
    layers, _ = found(STEMS["without a norm"], lambda net: setattr(net, "conv", conv))
    assert list(layers.stems()) == []


def test_a_hooked_convolution_is_left():
    layers, _ = found(
        STEMS["without a norm"], lambda net: net.conv.register_forward_hook(lambda *given: None)
    )
    assert list(layers.stems()) == []


def test_a_norm_in_training_mode_is_no_part_of_a_stem():
    layers, foldable = found(plain, lambda net: net.norm.train())
    assert list(layers.stems(foldable)) == []


def blocks(net, x):
    y = net.relu(net.conv(x))
    return net.relu(net.deep(y) + y)


RESIDUALS = {
    "operator": blocks,
    "function": lambda net, x: torch.relu(torch.add(net.deep(y := net.norm(net.conv(x))), y)),
    "method": lambda net, x: net.deep(y := net.relu(net.conv(x))).add(y).relu(),
    "in place": lambda net, x: net.relu_(net.deep(y := net.conv(x)).add_(y)),
    "a sum of sums": lambda net, x: net.relu(net.deep(y := net.conv(x)) + y + net.bare(y)),
    "the bias of the other": lambda net, x: net.relu((y := net.norm(net.conv(x))) + net.deep(y)),
    "idle layers": lambda net, x: net.relu(net.same(net.deep(y := net.relu(net.conv(x)))) + y),
}
NO_RESIDUALS = {
    "a number": lambda net, x: net.relu(net.conv(x) + 1),
    "a size": lambda net, x: net.relu(net.conv(x) + x.size(0)),
    "scaled": lambda net, x: net.relu(torch.add(net.deep(y := net.conv(x)), y, alpha=2)),
    "of unknown things": lambda net, x: net.relu(net.conv(x) + x.flip(0)),
    "twice the same": lambda net, x: net.relu((y := net.conv(x)) + y),
    "the sum is read twice": lambda net, x: net.relu(z := net.deep(y := net.conv(x)) + y).sum() + z,
    "no ReLU": lambda net, x: net.deep(y := net.conv(x)) + y,
    "into what others read": lambda net, x: net.relu((y := net.conv(x)).add_(net.deep(y))) + y,
    "left out with a pooling": lambda net, x: net.pool(net.relu(net.deep(y := net.conv(x)) + y)),
}


@pytest.mark.parametrize("forward", RESIDUALS.values(), ids=RESIDUALS)
def test_ends_of_residual_blocks_are_found(forward):
    layers, _ = found(forward)
    assert len(list(layers.residuals())) == 1


@pytest.mark.parametrize("forward", NO_RESIDUALS.values(), ids=NO_RESIDUALS)
def test_other_sums_are_left(forward):
    layers, _ = found(forward)
    assert list(layers.residuals()) == []


BIASED = {
    "operator": "deep",
    "the bias of the other": "deep",
    "idle layers": "deep",
    "in place": "deep",
    "a sum of sums": None,
}


@pytest.mark.parametrize("name", BIASED)
def test_the_bias_is_that_of_a_convolution_which_the_sum_alone_reads(name):
    layers, _ = found(RESIDUALS[name])
    (residual,) = layers.residuals()
    assert (residual.biased and residual.biased.target) == BIASED[name]


def test_the_bias_of_a_convolution_that_is_called_twice_stays():
    layers, _ = found(lambda net, x: net.relu(net.deep(y := net.deep(net.conv(x))) + y))
    (residual,) = layers.residuals()
    assert residual.biased is None


def test_a_bias_that_is_read_elsewhere_stays():
    layers, _ = found(lambda net, x: blocks(net, x) + net.deep.bias.sum())
    (residual,) = layers.residuals()
    assert residual.biased is None
