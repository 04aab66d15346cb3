"""Depthwise convolution, bias and activation in one, against float64 and PyTorch on one GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import depthwise_conv as room
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.depthwise_conv import channels_innermost, depthwise_conv2d
from steadytorch.kernels.launch import is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
]

NAN, INF = float("nan"), float("inf")
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
"""Half a unit in the last place, and a little for the sum in float32."""
# shape of the input; kernel; stride, padding and dilation
CASES = {
    "5x5, stride 2": ((8, 144, 56, 56), (5, 5), 2, 2, 1),
    "5x5": ((16, 480, 14, 14), (5, 5), 1, 2, 1),
    "7x7": ((4, 96, 56, 56), (7, 7), 1, 3, 1),
    "3x3, one image": ((1, 672, 14, 14), (3, 3), 1, 1, 1),
    "5x5, one image": ((1, 960, 7, 7), (5, 5), 1, 2, 1),
    "3x3, many images": ((64, 24, 112, 112), (3, 3), 2, 1, 1),
    "odd sizes": ((3, 37, 19, 23), (3, 5), (2, 1), (1, 0), 1),
    "dilated": ((2, 64, 30, 29), (3, 3), 1, 2, 2),
}


def operands(shape, kernel, dtype=torch.float16, biased=True):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    x = random(*shape).contiguous(memory_format=torch.channels_last)
    weight = channels_innermost(random(shape[1], 1, *kernel))
    return x, weight, random(shape[1]) if biased else None


def eager(x, weight, bias, stride=1, padding=1, dilation=1, activation=""):
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups=x.shape[1])
    return ACTIVATIONS[activation](y)


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = room.PreparedDepthwiseConv.__call__
    monkeypatch.setattr(
        room.PreparedDepthwiseConv,
        "__call__",
        lambda self, *given: count.append(1) or call(self, *given),
    )
    return count


def near(found, tensors, *sizes):
    """Equal to float64 up to rounding; NaN and infinities are where they are."""
    wide = [None if t is None else t.double() for t in tensors]
    rounding = ROUNDING[found.dtype]
    torch.testing.assert_close(
        found.double(), eager(*wide, *sizes), rtol=rounding, atol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_are_those_of_float64_rounded_once(case, dtype, launched):
    tensors = operands(*case[:2], dtype)
    first, found = (depthwise_conv2d(*tensors, *case[2:], "hardswish") for _ in range(2))
    near(found, tensors, *case[2:], "hardswish")
    assert found.stride() == eager(*tensors, *case[2:]).stride()
    assert torch.equal(first, found)
    assert len(launched) == 2


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_and_without_bias(activation, biased, launched):
    tensors = operands((2, 48, 15, 14), (3, 3), biased=biased)
    near(depthwise_conv2d(*tensors, 1, 1, 1, activation), tensors, 1, 1, 1, activation)
    assert len(launched) == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_weight_may_lie_as_pytorch_lays_it(layout, launched):
    x, weight, bias = operands((2, 48, 15, 14), (5, 5))
    tensors = (x, weight.contiguous(memory_format=layout), bias)
    assert torch.equal(depthwise_conv2d(*tensors, 1, 2), depthwise_conv2d(x, weight, bias, 1, 2))
    assert len(launched) == 2


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("activation", ["", "relu", "hardswish"])
def test_what_is_not_finite_spreads_as_in_float64(value, activation):
    tensors = operands((1, 32, 15, 14), (3, 3))
    tensors[0][0, 1, 4, 5] = value
    near(depthwise_conv2d(*tensors, 1, 1, 1, activation), tensors, 1, 1, 1, activation)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight, bias: (x.contiguous(), weight, bias),
        lambda x, weight, bias: (x.float(), weight.float(), bias.float()),
        lambda x, weight, bias: (x[:0], weight, bias),
        lambda x, weight, bias: (x[0], weight, bias),
        lambda x, weight, bias: (x.mT, weight, bias),
        lambda x, weight, bias: (x, weight, torch.stack([bias, bias], 1)[:, 0]),
        lambda x, weight, bias: (x, torch.cat([weight, weight]), None),
    ],
    ids=["in order", "float32", "empty", "no batch", "transposed", "bias strided", "two outputs"],
)
def test_what_the_program_does_not_take_is_pytorchs_own(change, launched):
    given = change(*operands((2, 16, 9, 9), (3, 3)))
    expected = F.conv2d(*given, 1, 1, 1, groups=16).relu()
    torch.testing.assert_close(depthwise_conv2d(*given, 1, 1, 1, "relu"), expected)
    assert launched == []


def test_autocast_is_left_to_pytorch(launched):
    x, weight, bias = (t.float() for t in operands((2, 16, 9, 9), (3, 3)))
    with torch.autocast("cuda", torch.float16):
        assert depthwise_conv2d(x, weight, bias, 1, 1).dtype == torch.float16
    assert launched == []


def test_it_can_be_recorded():
    x, weight, bias = operands((2, 64, 28, 28), (3, 3))
    depthwise_conv2d(x, weight, bias, 1, 1, 1, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = depthwise_conv2d(x, weight, bias, 1, 1, 1, "silu")
    x.normal_()
    graph.replay()
    assert torch.equal(found, depthwise_conv2d(x, weight, bias, 1, 1, 1, "silu"))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_has_it_as_one_node(launched):
    tensors = operands((2, 64, 28, 28), (3, 3))
    compiled = torch.compile(
        lambda x, weight, bias: depthwise_conv2d(x * 2, weight, bias, 2, 1, 1, "relu6") + 1,
        fullgraph=True,
    )
    with torch.no_grad():
        found = compiled(*tensors)
        assert len(launched) == 1
        x, weight, bias = tensors
        expected = depthwise_conv2d(x * 2, weight, bias, 2, 1, 1, "relu6") + 1
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("activation", ["", "hardswish"])
def test_gradients_are_those_of_pytorch(activation):
    given = operands((2, 16, 9, 9), (3, 3))
    ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    weight = torch.randn(2, 16, 9, 9, device="cuda").half()
    (depthwise_conv2d(*ours, 1, 1, 1, activation) * weight).sum().backward()
    (eager(*theirs, 1, 1, 1, activation) * weight).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-2)
