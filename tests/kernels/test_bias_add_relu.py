from __future__ import annotations

import pytest
import torch

from steadytorch.kernels import bias_add_relu as room
from steadytorch.kernels.bias_add_relu import bias_add_relu

from .watching import Watch

LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
ROUNDING = {torch.float32: 2e-7, torch.float16: 6e-4, torch.bfloat16: 8e-3}
"""Half a unit in the last place, and a little for the sum in float32; a whole unit in bfloat16,
which Triton's interpreter cuts off where a GPU rounds."""
SHAPES = [(2, 3, 5, 7), (1, 1, 1, 1), (3, 8, 16, 16), (4, 6)]


def random(shape, dtype=torch.float32, layout="first", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.to(memory_format=LAYOUTS[layout]) if x.dim() == 4 else x


def eager(x, other, bias):
    if bias is not None:
        x = x + bias.reshape(-1, *[1] * (x.dim() - 2))
    return (x + other).relu()


def fused(x, other, bias):
    """The launcher itself, on any device."""
    shape = None if bias is None else bias.shape
    return room.prepared(x.shape, room.is_channels_last(x), shape, x.dtype, x.device)(
        x, other, bias
    )


def operands(shape, dtype=torch.float32, layout="first", biased=True):
    bias = random(shape[1:2], dtype, seed=2) if biased else None
    return random(shape, dtype, layout), random(shape, dtype, layout, seed=1), bias


@pytest.mark.usefixtures("interpreted")
class TestInterpreted:
    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_are_those_of_float64_rounded_once(self, shape, dtype, layout, biased):
        x, other, bias = operands(shape, dtype, layout, biased)
        found = fused(x, other, bias)
        wide = [None if t is None else t.double() for t in (x, other, bias)]
        assert (found.dtype, found.stride()) == (dtype, x.stride())
        rounding = ROUNDING[dtype]
        torch.testing.assert_close(found.double(), eager(*wide), rtol=rounding, atol=1e-6)

    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize(
        ("shape", "strides"),
        [
            ((2, 1, 4, 4), (16, 1, 4, 1)),
            ((2, 8, 1, 1), (8, 1, 8, 8)),
            ((1, 3, 4, 4), (3, 16, 4, 1)),
            ((1, 3, 4, 4), (48, 1, 12, 3)),
        ],
        ids=["one channel", "one pixel", "one image", "one image, last"],
    )
    def test_results_lie_as_those_of_pytorch(self, shape, strides, biased):
        x, other, bias = operands(shape, biased=biased)
        x, other = (t.as_strided(shape, strides) for t in (x, other))
        found, expected = fused(x, other, bias), eager(x, other, bias)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)

    def test_special_values_spread_as_in_pytorch(self):
        x, other, bias = operands((1, 4, 3, 3))
        x[0, 0], x[0, 1], other[0, 2] = float("nan"), float("inf"), -float("inf")
        x[0, 3], other[0, 3], bias[3] = -0.0, -0.0, -0.0
        torch.testing.assert_close(
            fused(x, other, bias), eager(x, other, bias), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(
    ("x", "other", "bias"),
    [
        operands((2, 3, 5, 7)),
        operands((2, 3, 5, 7), layout="last"),
        operands((2, 3, 5, 7), biased=False),
        operands((2, 3, 5, 7), torch.float64),
        operands((0, 3, 5, 7)),
        (random((2, 3, 5, 7)), random((2, 3, 5, 7), layout="last"), None),
        (random((2, 3, 5, 7)), random((1, 3, 1, 1)), random((3,))),
        (random((1, 3, 1, 1)), random((2, 3, 5, 7)), random((3,))),
        (random((2, 3, 5, 7)), random((2, 3, 5, 7)), random((1,))),
        (random((2, 3, 5, 7)), random((2, 3, 5, 7), torch.float16), random((3,))),
        (random((2, 3, 7, 5)).mT, random((2, 3, 7, 5)).mT, random((3,))),
        (torch.ones(2, 3, dtype=torch.int64), -torch.ones(2, 3, dtype=torch.int64), None),
    ],
    ids=[
        *("order", "last", "no bias", "double", "empty", "two layouts", "residual spread"),
        *("x spread", "one bias", "two types", "transposed", "integers"),
    ],
)
def test_on_the_cpu_it_is_pytorchs_own(x, other, bias):
    found, expected = bias_add_relu(x, other, bias), eager(x, other, bias)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_sizes_that_do_not_fit_are_refused_in_pytorchs_words():
    with pytest.raises(RuntimeError, match="must match the size"):
        bias_add_relu(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 5))


@pytest.mark.parametrize(
    ("x", "other", "bias"),
    [
        operands((2, 3, 5, 7)),
        (random((1, 3, 1, 1)), random((2, 3, 5, 7)), random((3,))),
        (random((3, 4)), random((2, 5, 3, 4)), random((4,))),
        (random((2, 3, 5, 7)), random((2, 3, 5, 7), torch.float16), random((1,))),
    ],
    ids=["plain", "spread", "spread over more axes", "two types"],
)
def test_gradients_are_those_of_pytorch(x, other, bias):
    ours = [t.clone().requires_grad_() for t in (x, other, bias)]
    theirs = [t.clone().requires_grad_() for t in (x, other, bias)]
    output, expected = bias_add_relu(*ours), eager(*theirs)
    weight = random(expected.shape, seed=3)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        assert one.grad.dtype == two.grad.dtype
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.sampled(every=3)
def test_pytorch_finds_the_operator_well_formed(layout, biased):
    x, other, bias = operands((2, 3, 4, 5), layout=layout, biased=biased)
    x.requires_grad_()
    torch.library.opcheck(torch.ops.steadytorch.bias_add_relu.default, (x, other, bias))


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    x = random((1, 2, 4, 4))
    expected = bias_add_relu(x, x, None)
    with Watch() as watch:
        found = bias_add_relu(x, x, None)
    assert watch.seen[0] is bias_add_relu
    assert torch.equal(found, expected)
