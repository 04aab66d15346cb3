"""A convolution of few channels, bias and activation in one, against float64 on one GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import small_channel_conv as room
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.launch import is_installed
from steadytorch.kernels.small_channel_conv import thin_conv2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
]

NAN, INF = float("nan"), float("inf")
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
"""Half a unit in the last place, and a little for the sum in float32."""
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]
# shape of the input and outputs; kernel; stride, padding and dilation
CASES = {
    "efficientnet": ((64, 3, 224, 224), 32, (3, 3), 2, 1, 1),
    "mobilenet, one image": ((1, 3, 224, 224), 16, (3, 3), 2, 1, 1),
    "two images": ((2, 3, 224, 224), 24, (3, 3), 2, 1, 1),
    "vgg": ((4, 3, 224, 224), 64, (3, 3), 1, 1, 1),
    "6x6": ((2, 3, 320, 320), 48, (6, 6), 2, 2, 1),
    "7x7": ((2, 3, 112, 112), 96, (7, 7), 2, 3, 1),
    "one channel": ((16, 1, 28, 28), 32, (5, 5), 1, 2, 1),
    "four channels": ((3, 4, 33, 47), 40, (3, 3), 1, 1, 1),
    "odd sizes": ((3, 3, 299, 299), 33, (3, 5), (2, 1), (1, 0), 1),
    "dilated": ((2, 3, 30, 29), 128, (3, 3), 1, 2, 2),
}


def laid(tensor, last):
    return tensor.contiguous(memory_format=torch.channels_last) if last else tensor


def operands(shape, outputs, kernel, dtype=torch.float16, last=(True, True), biased=True):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    x, weight = random(*shape), random(outputs, shape[1], *kernel)
    return laid(x, last[0]), laid(weight, last[1]), random(outputs) if biased else None


def ordinary(**options):
    return operands((2, 3, 15, 14), 16, (3, 3), **options)


def eager(x, weight, bias, stride=1, padding=1, dilation=1, activation=""):
    return ACTIVATIONS[activation](F.conv2d(x, weight, bias, stride, padding, dilation))


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = room.PreparedSmallChannelConv.__call__
    monkeypatch.setattr(
        room.PreparedSmallChannelConv,
        "__call__",
        lambda self, *given: count.append(1) or call(self, *given),
    )
    return count


def near(found, tensors, *sizes):
    """Equal to float64 up to rounding; NaN and infinities are where they are."""
    wide = [None if t is None else t.double() for t in tensors]
    torch.testing.assert_close(
        found.double(), eager(*wide, *sizes), rtol=ROUNDING[found.dtype], atol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("last", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_are_those_of_float64_rounded_once(case, last, dtype, launched):
    tensors = operands(*case[:3], dtype, last)
    first, found = (thin_conv2d(*tensors, *case[3:], "hardswish") for _ in range(2))
    near(found, tensors, *case[3:], "hardswish")
    assert found.stride() == eager(*tensors, *case[3:]).stride()
    assert torch.equal(first, found)
    assert len(launched) == 2


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_and_without_bias(activation, biased, launched):
    tensors = ordinary(biased=biased)
    near(thin_conv2d(*tensors, 2, 1, 1, activation), tensors, 2, 1, 1, activation)
    assert len(launched) == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("activation", ["", "relu", "hardswish"])
@pytest.mark.parametrize("which", [0, 1], ids=["pixel", "weight"])
def test_what_is_not_finite_spreads_as_in_float64(which, value, activation):
    tensors = ordinary()
    tensors[which][0, 1, 1, 0] = value
    near(thin_conv2d(*tensors, 1, 1, 1, activation), tensors, 1, 1, 1, activation)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight, bias: (x.float(), weight.float(), bias.float()),
        lambda x, weight, bias: (x[:0], weight, bias),
        lambda x, weight, bias: (x[0], weight, bias),
        lambda x, weight, bias: (x.mT, weight, bias),
        lambda x, weight, bias: (x, weight, torch.stack([bias, bias], 1)[:, 0]),
        lambda x, weight, bias: (x, weight[:, :, :1, :1], bias),
        lambda x, weight, bias: (torch.cat([x, x], 1), torch.cat([weight, weight], 1), bias),
    ],
    ids=["float32", "empty", "no batch", "transposed", "bias strided", "1x1", "six channels"],
)
def test_what_the_program_does_not_take_is_pytorchs_own(change, launched):
    given = change(*ordinary())
    expected = F.conv2d(*given, 1, 1).relu()
    torch.testing.assert_close(thin_conv2d(*given, 1, 1, 1, "relu"), expected)
    assert launched == []


def test_autocast_is_left_to_pytorch(launched):
    x, weight, bias = (t.float() for t in ordinary())
    with torch.autocast("cuda", torch.float16):
        assert thin_conv2d(x, weight, bias, 1, 1).dtype == torch.float16
    assert launched == []


def test_it_can_be_recorded():
    x, weight, bias = operands((2, 3, 64, 64), 32, (3, 3))
    thin_conv2d(x, weight, bias, 2, 1, 1, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = thin_conv2d(x, weight, bias, 2, 1, 1, "silu")
    x.normal_()
    graph.replay()
    assert torch.equal(found, thin_conv2d(x, weight, bias, 2, 1, 1, "silu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("last", LAYOUTS, ids=str)
def test_a_compiled_function_has_it_as_one_node(last, launched):
    tensors = operands((2, 3, 64, 64), 32, (3, 3), last=last)
    compiled = torch.compile(
        lambda x, weight, bias: thin_conv2d(x * 2, weight, bias, 2, 1, 1, "relu6") + 1,
        fullgraph=True,
    )
    with torch.no_grad():
        found = compiled(*tensors)
        assert len(launched) == 1
        x, weight, bias = tensors
        expected = thin_conv2d(x * 2, weight, bias, 2, 1, 1, "relu6") + 1
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("activation", ["", "hardswish"])
def test_gradients_are_those_of_pytorch(activation):
    given = ordinary()
    ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    weight = torch.randn(2, 16, 15, 14, device="cuda").half()
    (thin_conv2d(*ours, 1, 1, 1, activation) * weight).sum().backward()
    (eager(*theirs, 1, 1, 1, activation) * weight).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-2)
