"""Pointwise convolutions in one pass, against float64 and PyTorch's own on the same GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import pointwise_conv as room
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.launch import is_installed
from steadytorch.kernels.pointwise_conv import pointwise_conv2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
]

LAST = torch.channels_last
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 4.2e-3}
"""Half a unit in the last place, and a little for the sum in float32."""
SMALL = [
    *(((1, 16, 112, 112), 64), ((1, 24, 56, 56), 72), ((1, 40, 28, 28), 240)),
    *(((1, 480, 14, 14), 112), ((1, 960, 7, 7), 160), ((1, 160, 7, 7), 960)),
    *(((1, 960, 1, 1), 240), ((2, 7, 5, 3), 130), ((3, 33, 9, 9), 2)),
]
LARGE = [
    *(((64, 32, 112, 112), 16), ((64, 16, 112, 112), 96), ((64, 96, 56, 56), 24)),
    *(((64, 240, 28, 28), 40), ((64, 672, 14, 14), 112), ((64, 1152, 7, 7), 320)),
    *(((64, 320, 7, 7), 1280), ((64, 1152, 1, 1), 48)),
]


def operands(shape, outputs, dtype=torch.float16, parts="bgo"):
    """All five tensors; of bias, gate and residual those whose letters are in `parts`."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    batch, channels, *sides = shape
    x = random(*shape).to(dtype).to(memory_format=LAST)
    weight = (random(outputs, channels, 1, 1) * channels**-0.5).to(dtype)
    bias = random(outputs).to(dtype) if "b" in parts else None
    gate = random(batch, channels, 1, 1).sigmoid().to(dtype) if "g" in parts else None
    other = None
    if "o" in parts:
        other = random(batch, outputs, *sides).to(dtype).to(memory_format=LAST)
    return x, weight, bias, gate, other


def eager(x, weight, bias, activation, gate, other):
    y = ACTIVATIONS[activation](F.conv2d(x if gate is None else x * gate, weight, bias))
    return y if other is None else y + other


def exact(x, weight, bias, activation, gate, other):
    """In float64, by a product of matrices; the product with the gate is rounded as PyTorch's."""
    scaled = x if gate is None else x * gate
    y = torch.einsum("nchw,kc->nkhw", scaled.double(), weight[:, :, 0, 0].double())
    if bias is not None:
        y = y + bias.double()[:, None, None]
    y = ACTIVATIONS[activation](y)
    return y if other is None else y + other.double()


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = room.PreparedPointwiseConv.__call__
    monkeypatch.setattr(
        room.PreparedPointwiseConv,
        "__call__",
        lambda self, *given: count.append(1) or call(self, *given),
    )
    return count


@pytest.mark.parametrize("parts", ["", "b", "bg", "bo", "bgo"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("shape", "outputs"), SMALL, ids=str)
def test_values_are_those_of_float64_rounded_once(shape, outputs, dtype, parts, launched):
    x, weight, bias, gate, other = operands(shape, outputs, dtype, parts)
    given = (x, weight, bias, "hardswish", gate, other)
    for _ in range(2):
        found = pointwise_conv2d(*given)
    assert (found.dtype, found.stride()) == (dtype, eager(*given).stride())
    torch.testing.assert_close(found.double(), exact(*given), rtol=ROUNDING[dtype], atol=2e-5)
    assert len(launched) == 2


@pytest.mark.parametrize(("activation", "parts"), [("silu", "b"), ("", "bgo")])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("shape", "outputs"), LARGE, ids=str)
def test_values_of_a_batch(shape, outputs, dtype, activation, parts, launched):
    x, weight, bias, gate, other = operands(shape, outputs, dtype, parts)
    given = (x, weight, bias, activation, gate, other)
    found = pointwise_conv2d(*given)
    assert found.stride() == eager(*given).stride()
    torch.testing.assert_close(found.double(), exact(*given), rtol=ROUNDING[dtype], atol=2e-5)
    assert torch.equal(found, pointwise_conv2d(*given))
    assert len(launched) == 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_spread_as_in_pytorch(activation, launched):
    x, weight, bias, gate, other = operands((2, 40, 9, 9), 24)
    x[0, 0, 0, 0], x[0, 1, 1, 1] = float("nan"), float("inf")
    weight[:] = weight.abs() + 0.1
    gate[0, 2], other[1, 0, 0, 0], other[1, 1, 0, 0] = 0, float("nan"), -float("inf")
    given = (x, weight, bias, activation, gate, other)
    found, expected = pointwise_conv2d(*given), eager(*given)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=4e-3, equal_nan=True)
    assert len(launched) == 1


@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize("x_last", [False, True])
@pytest.mark.parametrize("parts", ["b", "bg", "bo"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_single_pixels_have_the_strides_of_pytorch(activation, parts, x_last, weight_last):
    x, weight, bias, gate, other = operands((2, 40, 1, 1), 24, parts=parts)
    layouts = (torch.contiguous_format, LAST)
    x, weight = x.to(memory_format=layouts[x_last]), weight.to(memory_format=layouts[weight_last])
    assert x.is_contiguous()
    given = (x, weight, bias, activation, gate, other)
    assert pointwise_conv2d(*given).stride() == eager(*given).stride()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight, bias, gate, other: (x.contiguous(), weight, bias, gate, other),
        lambda x, weight, bias, gate, other: (x, weight, bias, gate, other[:1]),
        lambda x, weight, bias, gate, other: (x, weight, bias, gate[:1], other),
        lambda x, weight, bias, gate, other: (x[:0], weight, bias, gate[:0], other[:0]),
        lambda *given: tuple(t.float() for t in given),
        lambda *given: tuple(t.double() for t in given),
    ],
    ids=["in order", "residual spread", "one gate", "empty", "float32", "float64"],
)
def test_what_the_program_does_not_take_is_pytorchs_own(change, launched):
    x, weight, bias, gate, other = change(*operands((2, 16, 8, 8), 24))
    found = pointwise_conv2d(x, weight, bias, "silu", gate, other)
    assert torch.equal(found, eager(x, weight, bias, "silu", gate, other))
    assert launched == []


def test_autocast_chooses_the_type(launched):
    x, weight, bias, gate, _ = (t.float() for t in operands((2, 16, 8, 8), 24))
    with torch.autocast("cuda", torch.float16):
        found = pointwise_conv2d(x, weight, bias, "relu", gate, None)
        expected = eager(x, weight, bias, "relu", gate, None)
    assert found.dtype is torch.float16
    assert torch.equal(found, expected)
    assert launched == []


def test_it_can_be_recorded(launched):
    x, weight, bias, gate, other = operands((1, 672, 7, 7), 160)
    given = (x, weight, bias, "", gate, other)
    pointwise_conv2d(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = pointwise_conv2d(*given)
    x.normal_()
    graph.replay()
    assert torch.equal(found, pointwise_conv2d(*given))
    assert len(launched) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(2, 40, 9, 9), (2, 40, 1, 1)], ids=str)
def test_compiled_it_is_the_same(shape, launched):
    x, weight, bias, gate, other = operands(shape, 24)
    given = (x, weight, bias, "hardswish", gate, other)
    expected = pointwise_conv2d(*given)
    torch._dynamo.reset()
    found = torch.compile(lambda *given: pointwise_conv2d(*given), fullgraph=True)(*given)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert len(launched) == 2


def test_gradients_are_those_of_pytorch():
    x, weight, bias, gate, other = operands((2, 16, 8, 8), 24)
    ours, theirs = (
        [t.clone().requires_grad_() for t in (x, weight, bias, gate, other)] for _ in range(2)
    )
    loss = torch.randn(2, 24, 8, 8, device="cuda", dtype=x.dtype)
    for function, (x, weight, bias, gate, other) in ((pointwise_conv2d, ours), (eager, theirs)):
        (function(x, weight, bias, "silu", gate, other) * loss).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-2)
