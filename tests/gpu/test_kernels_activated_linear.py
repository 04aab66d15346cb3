"""Linears with their activation in one pass, against float64 and PyTorch's own on the same GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import activated_linear as room
from steadytorch.kernels.activated_linear import activated_linear
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.launch import is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
]

ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 4.2e-3}
"""Half a unit in the last place, and a little for the sum in float32."""
SHAPES = [
    *(((32, 56, 56, 96), 384), ((32, 28, 28, 192), 768), ((1, 56, 56, 96), 384)),
    *(((197, 64), 256), ((3, 5, 33), 130), ((9, 1), 16), ((4, 200), 1)),
]
"""Of the input, and how many outputs: ConvNeXt's first, and others."""


def operands(shape, outputs, dtype=torch.float16, is_biased=True):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    x = random(*shape).to(dtype)
    weight = (random(outputs, shape[-1]) * shape[-1] ** -0.5).to(dtype)
    return x, weight, random(outputs).to(dtype) if is_biased else None


def eager(x, weight, bias, activation):
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def exact(x, weight, bias, activation):
    """In float64."""
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    return eager(*wide, activation)


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = room.PreparedActivatedLinear.__call__
    monkeypatch.setattr(
        room.PreparedActivatedLinear,
        "__call__",
        lambda self, *given: count.append(1) or call(self, *given),
    )
    return count


@pytest.mark.parametrize("is_biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
def test_values_are_those_of_float64_rounded_once(
    shape, outputs, dtype, activation, is_biased, launched
):
    given = (*operands(shape, outputs, dtype, is_biased), activation)
    found, again = activated_linear(*given), activated_linear(*given)
    assert (found.dtype, found.stride()) == (dtype, eager(*given).stride())
    torch.testing.assert_close(found.double(), exact(*given), rtol=ROUNDING[dtype], atol=2e-5)
    assert torch.equal(found, again)
    assert len(launched) == 2


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_of_every_number_gelu_is_exact_to_the_rounding(activation, launched):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    x = bits[bits.isfinite()].reshape(-1, 16).cuda()
    found = activated_linear(x, torch.eye(16, device="cuda").half(), None, activation)
    expected = ACTIVATIONS[activation](x.double())
    # Half a unit in the last place, and what the approximation may be off.
    torch.testing.assert_close(found.double(), expected, rtol=2**-11 + 1e-5, atol=3.3e-7)
    assert len(launched) == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_spread_as_in_pytorch(activation, launched):
    x, weight, bias = operands((2, 9, 40), 24)
    x[0, 0, 0], x[0, 1, 1], x[0, 2, 2] = float("nan"), float("inf"), -float("inf")
    weight[:] = weight.abs() + 0.1
    given = (x, weight, bias, activation)
    expected = exact(*given).to(x.dtype)
    torch.testing.assert_close(
        activated_linear(*given), expected, rtol=2e-3, atol=4e-3, equal_nan=True
    )
    assert len(launched) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight, bias: (x.transpose(0, 1), weight, bias),
        lambda x, weight, bias: (x[0, 0], weight, bias),
        lambda x, weight, bias: (x[:0], weight, bias),
        lambda x, weight, bias: (x[..., ::2], weight[:, ::2], bias),
        lambda *given: tuple(t.float() for t in given),
    ],
    ids=["transposed", "one row", "empty", "strided", "float32"],
)
def test_what_the_program_does_not_take_is_pytorchs_own(change, launched):
    given = (*change(*operands((2, 8, 16), 24)), "gelu")
    assert torch.equal(activated_linear(*given), eager(*given))
    assert launched == []


def test_autocast_chooses_the_type(launched):
    given = (*(t.float() for t in operands((2, 8, 16), 24)), "relu")
    with torch.autocast("cuda", torch.float16):
        found, expected = activated_linear(*given), eager(*given)
    assert found.dtype is torch.float16
    assert torch.equal(found, expected)
    assert launched == []


def test_it_can_be_recorded(launched):
    given = (*operands((784, 192), 768), "gelu")
    activated_linear(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = activated_linear(*given)
    given[0].normal_()
    graph.replay()
    assert torch.equal(found, activated_linear(*given))
    assert len(launched) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_the_same_behind_a_permutation(launched):
    x, weight, bias = operands((2, 9, 8, 96), 384)
    image = x.permute(0, 3, 1, 2)  # as a convolution leaves it in channels_last

    def block(image):
        return activated_linear(image.permute(0, 2, 3, 1), weight, bias, "gelu")

    expected = block(image)
    torch._dynamo.reset()
    found = torch.compile(block, fullgraph=True)(image)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert len(launched) == 2


def test_gradients_are_those_of_pytorch():
    ours, theirs = (
        [t.clone().requires_grad_() for t in operands((2, 8, 16), 24)] for _ in range(2)
    )
    loss = torch.randn(2, 8, 24, device="cuda", dtype=torch.float16)
    for function, given in ((activated_linear, ours), (eager, theirs)):
        (function(*given, "gelu") * loss).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-2)
