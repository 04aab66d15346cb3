"""Bias, residual and ReLU in one, against float64 and PyTorch's own operators on the same GPU."""

from __future__ import annotations

import pytest
import torch

from steadytorch.kernels import bias_add_relu as room
from steadytorch.kernels.bias_add_relu import bias_add_relu
from steadytorch.kernels.launch import is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
]

LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
ROUNDING = {torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Half a unit in the last place, and a little for the sum in float32."""
SHAPES = [(4, 64, 56, 56), (3, 5, 7, 9), (2, 2048, 1, 1), (1, 1, 1, 1), (32, 100)]


def operands(shape, dtype=torch.float32, layout="first", biased=True):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    x, other = random(*shape), random(*shape)
    if len(shape) == 4:
        x, other = (t.to(memory_format=LAYOUTS[layout]) for t in (x, other))
    return x, other, random(shape[1]) if biased else None


def eager(x, other, bias):
    if bias is not None:
        x = x + bias.reshape(-1, *[1] * (x.dim() - 2))
    return (x + other).relu()


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = room.PreparedBiasAddRelu.__call__
    monkeypatch.setattr(
        room.PreparedBiasAddRelu,
        "__call__",
        lambda self, *given: count.append(1) or call(self, *given),
    )
    return count


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_float64_rounded_once(shape, dtype, layout, biased, launched):
    x, other, bias = operands(shape, dtype, layout, biased)
    for _ in range(2):
        found = bias_add_relu(x, other, bias)
    wide = [None if t is None else t.double() for t in (x, other, bias)]
    assert (found.dtype, found.stride()) == (dtype, eager(x, other, bias).stride())
    torch.testing.assert_close(found.double(), eager(*wide), rtol=ROUNDING[dtype], atol=1e-6)
    assert len(launched) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_float32_it_equals_pytorchs_own(layout):
    x, other, bias = operands((4, 64, 56, 56), layout=layout)
    x[0, 0], x[0, 1], other[0, 2] = float("nan"), float("inf"), -float("inf")
    x[0, 3], other[0, 3], bias[3] = -0.0, -0.0, -0.0
    found, expected = bias_add_relu(x, other, bias), eager(x, other, bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    known = ~expected.isnan()
    assert torch.equal(found.signbit() & known, expected.signbit() & known)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, other, bias: (x, other[:1], bias),
        lambda x, other, bias: (x, other.to(memory_format=torch.channels_last), bias),
        lambda x, other, bias: (x, other.half(), bias),
        lambda x, other, bias: (x.double(), other.double(), bias.double()),
        lambda x, other, bias: (x.mT, other.mT, bias),
        lambda x, other, bias: (x[:0], other[:0], bias),
        lambda x, other, bias: (x, other, bias[:1]),
        lambda x, other, bias: (x, other, torch.stack([bias, bias], 1)[:, 0]),
    ],
    ids=[
        "spread",
        "layouts",
        "types",
        "float64",
        "transposed",
        "empty",
        "one bias",
        "bias strided",
    ],
)
def test_what_the_program_does_not_take_is_pytorchs_own(change, launched):
    given = change(*operands((2, 3, 8, 8)))
    assert torch.equal(bias_add_relu(*given), eager(*given))
    assert launched == []


def test_it_can_be_recorded():
    x, other, bias = operands((4, 64, 28, 28))
    bias_add_relu(x, other, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = bias_add_relu(x, other, bias)
    x.normal_()
    graph.replay()
    assert torch.equal(found, eager(x, other, bias))


def test_gradients_are_those_of_pytorch():
    given = operands((2, 3, 8, 8))
    ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    bias_add_relu(*ours).pow(2).sum().backward()
    eager(*theirs).pow(2).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)
