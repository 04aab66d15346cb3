from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import activated_linear as room
from steadytorch.kernels import pointwise_tile
from steadytorch.kernels.activated_linear import activated_linear
from steadytorch.kernels.activations import ACTIVATIONS

from .watching import Watch

ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 8e-3}
"""Half a unit in the last place, and a little for the sum in float32; a whole unit in bfloat16,
which Triton's interpreter cuts off where a GPU rounds."""
SHAPES = [
    *(((70, 24), 40), ((2, 5, 7, 96), 384), ((3, 4, 136), 17), ((9, 1, 7), 130), ((1, 200), 1)),
    *(((5, 1), 16), ((2, 1, 1, 33), 2), ((2, 160, 20), 24)),
]
"""Of the input, and how many outputs."""


def random(shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(shape, outputs, dtype=torch.float16, is_biased=True):
    weight = random((outputs, shape[-1]), torch.float32, seed=1) * shape[-1] ** -0.5
    bias = random((outputs,), dtype, seed=2) if is_biased else None
    return random(shape, dtype), weight.to(dtype), bias


def eager(x, weight, bias, activation):
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def exact(x, weight, bias, activation):
    """In float64."""
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    return eager(*wide, activation)


def fused(x, weight, bias, activation):
    """The launcher itself, on any device."""
    found = room.program_for(x, weight, bias, activation)
    assert found is not None
    return found(x, weight, bias)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # as an exponential may
class TestInterpreted:
    @pytest.mark.parametrize("is_biased", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
    def test_values_are_those_of_float64_rounded_once(self, shape, outputs, dtype, is_biased):
        given = (*operands(shape, outputs, dtype, is_biased), "gelu")
        found, expected = fused(*given), eager(*given)
        assert (found.dtype, found.shape, found.stride()) == (
            (dtype, expected.shape, expected.stride())
        )
        torch.testing.assert_close(found.double(), exact(*given), rtol=ROUNDING[dtype], atol=1e-5)

    @pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
    def test_so_are_those_of_large_blocks(self, shape, outputs, monkeypatch):
        monkeypatch.setattr(pointwise_tile, "CORES", 1)
        given = (*operands(shape, outputs), "gelu_tanh")
        rounding = ROUNDING[torch.float16]
        torch.testing.assert_close(fused(*given).double(), exact(*given), rtol=rounding, atol=1e-5)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    def test_every_activation_is_pytorchs(self, activation, dtype):
        x, weight, bias = operands((3, 25, 16), 24, dtype)
        given = (4 * x, weight, bias, activation)
        torch.testing.assert_close(
            fused(*given).double(), exact(*given), rtol=ROUNDING[dtype], atol=1e-5
        )

    @pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
    def test_of_every_number_gelu_is_exact_to_the_rounding(self, activation):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
        x = bits[bits.isfinite()].reshape(-1, 16)
        assert x.numel() == 63488
        found = fused(x, torch.eye(16, dtype=torch.float16), None, activation)
        expected = ACTIVATIONS[activation](x.double())
        # Half a unit in the last place, and what the approximation may be off.
        torch.testing.assert_close(found.double(), expected, rtol=2**-11 + 1e-5, atol=3.3e-7)

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_special_values_spread_as_in_pytorch(self, activation):
        x, weight, bias = operands((2, 9, 40), 24)
        x[0, 0, 0], x[0, 1, 1], x[0, 2, 2] = float("nan"), float("inf"), -float("inf")
        weight[:] = weight.abs() + 0.1
        given = (x, weight, bias, activation)
        # In float64: PyTorch's GELU of infinity is NaN in other types on CPUs.
        found, expected = fused(*given), exact(*given).to(x.dtype)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=4e-3, equal_nan=True)

    def test_the_same_bits_each_time(self):
        given = (*operands((2, 9, 200), 24), "silu")
        assert torch.equal(fused(*given), fused(*given))

    @pytest.mark.parametrize("outputs", [1, 6])
    @pytest.mark.parametrize("shape", [(1, 1), (4, 1, 3), (2, 3, 1, 5), (1, 1, 1, 4)], ids=str)
    def test_strides_are_pytorchs_whatever_those_of_single_elements(self, shape, outputs):
        x, weight, bias = operands(shape, outputs)
        # Strides of axes of length one say nothing.
        odd = [9 if size == 1 else step for size, step in zip(shape, x.stride(), strict=True)]
        x = x.as_strided(shape, odd)
        given = (x, weight, bias, "relu6")
        assert x.is_contiguous()
        assert fused(*given).stride() == eager(*given).stride()


def spoilt(change):
    tensors = dict(zip(("x", "weight", "bias"), operands((2, 5, 24), 40), strict=True))
    return tuple({**tensors, **change(tensors)}.values())


NOT_COVERED = {
    "one row that is no batch": lambda t: {"x": t["x"][0, 0]},
    "in another order": lambda t: {"x": t["x"].transpose(0, 1)},
    "part of a row": lambda t: {"x": t["x"][..., :8], "weight": t["weight"][:, :8].contiguous()},
    "weight strided": lambda t: {"weight": torch.cat([t["weight"]] * 2, 1)[:, :24]},
    "weight of one output": lambda t: {"weight": t["weight"][0], "bias": None},
    "bias strided": lambda t: {"bias": torch.stack([t["bias"]] * 2, 1)[:, 0]},
    "bias spread": lambda t: {"bias": t["bias"][:1]},
    "float32": lambda t: {name: tensor.float() for name, tensor in t.items()},
    "no rows": lambda t: {"x": t["x"][:0]},
}


@pytest.mark.parametrize("change", NOT_COVERED.values(), ids=NOT_COVERED)
def test_on_the_cpu_it_is_pytorchs_own(change):
    given = (*spoilt(change), "hardswish")
    found, expected = activated_linear(*given), eager(*given)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("change", [c for name, c in NOT_COVERED.items() if name != "no rows"])
def test_for_what_it_is_not_made_there_is_no_program(change):
    assert room.program_for(*spoilt(change), "hardswish") is None


def test_for_more_elements_than_offsets_reach_there_is_no_program():
    shapes = (torch.Size((2**22, 512)), torch.Size((2, 512)))
    given = (None, "gelu", torch.float16, torch.device("cpu"))
    assert room.prepared(*shapes, *given) is None


def test_sizes_that_do_not_fit_are_refused_in_pytorchs_words():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        activated_linear(torch.ones(2, 3), torch.ones(2, 4))


def test_an_activation_must_be_known():
    with pytest.raises(KeyError, match="mish"):
        activated_linear(torch.ones(2, 3), torch.ones(2, 3), activation="mish")


def gradients(function, tensors, activation):
    """Gradients of all tensors, and of the sum of their squares once more."""
    found = function(*tensors, activation)
    asked = [t for t in tensors if t is not None]
    loss = (found * random(found.shape, torch.float64, seed=9)).sum()
    first = torch.autograd.grad(loss, asked, create_graph=True)
    if activation == "hardsigmoid":  # PyTorch has no second one
        return first
    squares = torch.stack([grad.pow(2).sum() for grad in first]).sum()
    return *first, *torch.autograd.grad(squares, asked, materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("is_biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_pytorch_and_theirs_too(activation, is_biased):
    tensors = operands((2, 4, 3), 5, torch.float64, is_biased)
    tensors = [None if t is None else t.requires_grad_() for t in tensors]
    ours, theirs = (gradients(f, tensors, activation) for f in (activated_linear, eager))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_tensor_given_twice_has_both_gradients():
    x = random((4, 4), torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(activated_linear(x, x, activation="silu").sum(), x)
    (expected,) = torch.autograd.grad(eager(x, x, None, "silu").sum(), x)
    torch.testing.assert_close(found, expected)


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias = operands((2, 4, 3), 5, torch.float64)
    weight.requires_grad_()
    activated_linear(x, weight, bias, "gelu").sum().backward()
    assert weight.grad is not None
    assert x.grad is bias.grad is None


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 1, 4, 3)], ids=str)
@pytest.mark.parametrize("is_biased", [False, True], ids=["", "bias"])
@pytest.mark.sampled(every=5)
def test_pytorch_finds_the_operator_well_formed(shape, is_biased):
    x, weight, bias = operands(shape, 6, torch.float32, is_biased)
    given = (x.requires_grad_(), weight, bias, "gelu")
    torch.library.opcheck(torch.ops.steadytorch.activated_linear.default, given)


def test_it_is_one_node_of_an_exported_program():
    class Model(torch.nn.Module):
        def forward(self, x, weight, bias):
            return activated_linear(x, weight, bias, "gelu_tanh")

    given = operands((2, 4, 3), 6, torch.float32)
    program = torch.export.export(Model(), given)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.steadytorch.activated_linear.default]
    assert torch.equal(program.module()(*given), eager(*given, "gelu_tanh"))


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    x, weight, bias = operands((4, 3), 6)
    expected = activated_linear(x, weight, bias)
    with Watch() as watch:
        found = activated_linear(x, weight, bias)
    assert watch.seen[0] is activated_linear
    assert torch.equal(found, expected)


def test_transformations_of_functions_get_pytorchs_own():
    x, weight, bias = operands((4, 3), 6, torch.float64)
    found = torch.func.grad(lambda x: activated_linear(x, weight, bias, "gelu").sum())
    expected = torch.func.grad(lambda x: eager(x, weight, bias, "gelu").sum())
    torch.testing.assert_close(found(x), expected(x))
