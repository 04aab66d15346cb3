from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from steadytorch.kernels import small_channel_conv as room
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.small_channel_conv import SmallChannelTile, is_thin, thin_conv2d, tile_for
from steadytorch.kernels.stem import CORES

from .watching import Watch

NAN, INF = float("nan"), float("inf")
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""A unit in the last place, which Triton's interpreter cuts off where a GPU rounds."""
# shape of the input and outputs; kernel; stride, padding and dilation
CASES = {
    "3x3, stride 2": ((2, 3, 15, 14), 32, (3, 3), (2, 2), (1, 1), (1, 1)),
    "3x3": ((1, 3, 9, 11), 24, (3, 3), (1, 1), (1, 1), (1, 1)),
    "no padding": ((2, 3, 9, 9), 16, (3, 3), (2, 2), (0, 0), (1, 1)),
    "one channel": ((3, 1, 8, 7), 8, (5, 5), (1, 1), (2, 2), (1, 1)),
    "two channels": ((2, 2, 6, 5), 2, (1, 3), (1, 1), (0, 1), (1, 1)),
    "four channels, 6x6": ((1, 4, 16, 13), 40, (6, 6), (2, 2), (2, 2), (1, 1)),
    "7x7, stride 4": ((1, 3, 21, 26), 96, (7, 7), (4, 4), (3, 3), (1, 1)),
    "3x5, uneven": ((3, 3, 10, 9), 20, (3, 5), (2, 1), (1, 0), (1, 1)),
    "dilated unevenly": ((2, 3, 13, 16), 33, (3, 3), (2, 3), (0, 4), (3, 2)),
    "patches": ((2, 3, 12, 8), 17, (4, 4), (4, 4), (0, 0), (1, 1)),
    "more padding than image": ((1, 3, 2, 3), 16, (3, 3), (1, 1), (4, 5), (1, 1)),
    "most outputs": ((1, 3, 5, 4), 128, (2, 2), (1, 1), (0, 0), (1, 1)),
}


def eager(x, weight, bias, stride, padding, dilation, activation=""):
    return ACTIVATIONS[activation](F.conv2d(x, weight, bias, stride, padding, dilation))


def laid(tensor, last):
    return tensor.contiguous(memory_format=torch.channels_last) if last else tensor


def operands(shape, outputs, kernel, dtype=torch.float16, last=(True, True), biased=True):
    """Input, weight and bias; `last` is of the first two."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight = random(*shape), random(outputs, shape[1], *kernel)
    return laid(x, last[0]), laid(weight, last[1]), random(outputs) if biased else None


def program(x, weight, bias, stride, padding, dilation, activation=""):
    """The launcher for these on any device, or None."""
    like = (x.shape, x.stride(), weight.shape, weight.stride())
    sizes = (stride, padding, dilation, activation)
    return room.prepared(*like, bias is not None, x.dtype, x.device, *sizes)


def near(tensors, *sizes):
    """Assert equality with float64 up to rounding, and equal places of NaN and infinities."""
    fused = program(*tensors, *sizes)
    assert fused is not None
    found = fused(*tensors)
    expected = eager(*(None if t is None else t.double() for t in tensors), *sizes)
    assert found.dtype == tensors[0].dtype
    assert found.stride() == expected.stride()
    torch.testing.assert_close(
        found.double(), expected, rtol=ROUNDING[found.dtype], atol=1e-4, equal_nan=True
    )
    return found


LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # as an exponential may
class TestInterpreted:
    @pytest.mark.parametrize("last", LAYOUTS, ids=str)
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_values_and_strides_are_those_of_float64(self, case, last):
        near(operands(*case[:3], last=last), *case[3:])

    @pytest.mark.parametrize("strides", [(63, 63, 7, 1), (63, 1, 7, 1)], ids=str)
    def test_of_one_channel_the_strides_say_how_the_result_lies(self, strides):
        x, *others = operands((2, 1, 9, 7), 8, (3, 3), last=(False, False))
        near((x.as_strided(x.shape, strides), *others), *SIZES)

    @pytest.mark.parametrize(
        "tile",
        [SmallChannelTile(128, 64, 32), SmallChannelTile(64, 16, 16), SmallChannelTile(32, 32, 16)],
        ids=str,
    )
    @pytest.mark.parametrize("name", ["3x3, stride 2", "dilated unevenly", "four channels, 6x6"])
    def test_every_tile_computes_the_same(self, tile, name, monkeypatch):
        monkeypatch.setattr(room, "tile_for", lambda *_: tile)
        near(operands(*CASES[name][:3], torch.bfloat16), *CASES[name][3:])

    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_every_activation_with_and_without_bias(self, activation, biased):
        case = CASES["3x3, stride 2"]
        near(operands(*case[:3], biased=biased), *case[3:], activation)

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("activation", ["", "relu", "relu6", "sigmoid"])
    @pytest.mark.parametrize("last", [False, True])
    def test_a_pixel_that_is_not_finite_is_seen_by_its_own_windows_alone(
        self, value, activation, last
    ):
        case = CASES["3x3, stride 2"]
        tensors = operands(*case[:3], last=(last, last))
        tensors[0][0, 1, 4, 5] = value
        found = near(tensors, *case[3:], activation)
        assert found[1].isfinite().all()
        assert found[0, :, 4:].isfinite().all()

    @pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
    @pytest.mark.parametrize("value", [NAN, INF])
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_a_weight_that_is_not_finite_meets_the_zeros_of_the_padding(self, case, value):
        """Zero times infinity is NaN: in float64, and in the products of libraries."""
        tensors = operands(*case[:3], biased=False)
        tensors[1][1, 0, 0, 0] = value
        found = near(tensors, *case[3:])
        assert found[:, 0].isfinite().all()

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_sizes_that_pytorch_takes(self, data):
        def pair(low, high):
            return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

        shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), *pair(2, 12))
        outputs, kernel = data.draw(st.integers(2, 70)), pair(1, 5)
        dtype = data.draw(st.sampled_from(list(ROUNDING)))
        tensors = operands(shape, outputs, kernel, dtype, data.draw(st.sampled_from(LAYOUTS)))
        sizes = (pair(1, 3), pair(0, 3), pair(1, 3))
        try:
            pixels = eager(*tensors, *sizes).shape[2:].numel()
        except RuntimeError:
            pixels = 0
        if pixels > 1 and kernel != (1, 1):
            near(tensors, *sizes)
        else:
            assert program(*tensors, *sizes) is None


def ordinary(**options):
    return operands((2, 3, 9, 7), 8, (3, 3), **options)


SIZES = ((1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("tensors", "sizes", "activation"),
    [
        (ordinary(dtype=torch.float32), SIZES, ""),
        (ordinary(dtype=torch.float64), SIZES, ""),
        ([t.int() for t in ordinary()], SIZES, ""),
        (operands((2, 5, 9, 7), 8, (3, 3)), SIZES, ""),
        (operands((2, 3, 9, 7), 1, (3, 3)), SIZES, ""),
        (operands((2, 3, 9, 7), 129, (3, 3)), SIZES, ""),
        (operands((2, 3, 9, 7), 8, (1, 1)), SIZES, ""),
        (operands((2, 3, 19, 17), 8, (11, 11)), SIZES, ""),
        (operands((2, 3, 1, 1), 8, (3, 3)), ((1, 1), (2, 2), (1, 1)), ""),
        (operands((2, 3, 3, 3), 8, (5, 5)), SIZES, ""),
        (operands((0, 3, 9, 7), 8, (3, 3)), SIZES, ""),
        ((ordinary()[0][0], *ordinary()[1:]), SIZES, ""),
        ((ordinary()[0].mT, *ordinary()[1:]), SIZES, ""),
        ((torch.ones(9, 7, 3).half().permute(2, 0, 1)[None], *ordinary()[1:]), SIZES, ""),
        (
            (
                torch.ones(9, 7, 1).half().permute(2, 0, 1)[None],
                torch.ones(8, 1, 3, 3).half(),
                None,
            ),
            *(SIZES, ""),
        ),
        ((ordinary()[0], ordinary()[1].mT, None), SIZES, ""),
        ((ordinary()[0], torch.ones(8, 1, 3, 3).half(), None), SIZES, ""),
        (ordinary(), ((1,), (1,), (1,)), ""),
        (ordinary(), SIZES, "tanh"),
        (operands((2, 3, 2, 2), 8, (5, 5)), SIZES, ""),
        (ordinary(), ((1, 1), (-1, -1), (1, 1)), ""),
        (ordinary(), ((0, 0), (1, 1), (1, 1)), ""),
        (ordinary(), ((1, 1), (1, 1), (0, 0)), ""),
    ],
    ids=[
        *("float32", "float64", "integers", "many channels", "one output", "many outputs"),
        *("single pixels", "many taps", "one pixel", "one pixel left", "empty", "no batch"),
        *("transposed", "a picture", "a grey picture", "weight transposed", "two groups"),
        *("sizes for all axes", "unknown activation", "kernel too large", "negative padding"),
        *("no stride", "no dilation"),
    ],
)
def test_what_is_not_covered_has_no_program(tensors, sizes, activation):
    assert program(*tensors, *sizes, activation) is None


def test_more_elements_than_32_bits_count_have_no_program():
    pytest.importorskip("triton", reason="the programs are Triton's: not installed")
    x, weight = (
        torch.empty(shape, dtype=torch.float16, device="meta")
        for shape in ((1, 3, 8192, 8192), (32, 3, 3, 3))
    )
    for last in (False, True):
        assert program(laid(x, last), weight, None, *SIZES) is None
        assert program(laid(x[..., :-1], last).contiguous(), weight, None, *SIZES) is not None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "tensors",
    [
        *(ordinary(last=last) for last in LAYOUTS),
        ordinary(biased=False),
        ordinary(dtype=torch.float64),
        operands((0, 3, 9, 7), 8, (3, 3)),
        (ordinary()[0].mT, *ordinary()[1:]),
        (ordinary()[0][0], *ordinary()[1:]),
        operands((2, 5, 9, 7), 8, (3, 3)),
    ],
    ids=[
        *map(str, LAYOUTS),
        *("no bias", "double", "empty", "transposed", "no batch", "many channels"),
    ],
)
def test_on_the_cpu_it_is_pytorchs_own(tensors, activation):
    found = thin_conv2d(*tensors, 2, 1, 1, activation)
    expected = eager(*tensors, 2, 1, 1, activation)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_integers_are_pytorchs_own():
    x, weight, bias = ((t * 3).int() for t in ordinary())
    assert torch.equal(
        thin_conv2d(x, weight, bias, 1, 1, 1, "relu"), eager(x, weight, bias, *SIZES, "relu")
    )


@pytest.mark.parametrize(
    "tensors",
    [
        (ordinary()[0], torch.ones(8, 2, 3, 3).half(), None),
        operands((2, 3, 1, 2), 8, (5, 5)),
        (ordinary()[0].float(), *ordinary()[1:]),
        (*ordinary()[:2], torch.ones(9).half()),
        (ordinary()[0][0, 0], *ordinary()[1:]),
    ],
    ids=["channels", "kernel too large", "two types", "bias does not fit", "no channels"],
)
def test_what_pytorch_refuses_is_refused_in_its_words(tensors):
    with pytest.raises(RuntimeError) as expected:
        F.conv2d(*tensors)
    with pytest.raises(RuntimeError) as found:
        thin_conv2d(*tensors)
    assert str(found.value).split(",")[0] == str(expected.value).split(",")[0]


def test_an_activation_that_there_is_not_is_refused():
    with pytest.raises(KeyError, match="tanh"):
        thin_conv2d(*ordinary(), activation="tanh")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_pytorch(activation, biased):
    tensors = [t for t in ordinary(dtype=torch.float64, biased=biased) if t is not None]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    none = () if biased else (None,)
    thin_conv2d(*ours, *none, 2, 1, 1, activation).pow(2).sum().backward()
    eager(*theirs, *none, 2, 1, 1, activation).pow(2).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_a_tensor_given_twice_has_both_gradients():
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    sizes = (1, 1, 1, "silu")
    (expected,) = torch.autograd.grad(eager(x, x, None, *sizes).sum(), x)
    (found,) = torch.autograd.grad(thin_conv2d(x, x, None, *sizes).sum(), x)
    torch.testing.assert_close(found, expected)


def test_second_gradients_are_those_of_pytorch():
    tensors = [t.requires_grad_() for t in operands((1, 2, 4, 3), 2, (3, 3), torch.float64)]
    assert torch.autograd.gradgradcheck(
        lambda *given: thin_conv2d(*given, 1, 1, 1, "silu"), tensors
    )


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias = ordinary(dtype=torch.float64)
    thin_conv2d(x, weight.requires_grad_(), bias, 1, 1).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("last", LAYOUTS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.sampled(every=5)
def test_pytorch_finds_the_operator_well_formed(needs_grad, biased, last):
    x, weight, bias = ordinary(dtype=torch.float64, biased=biased, last=last)
    arguments = (x.requires_grad_(needs_grad), weight, bias, [2, 2], [1, 1], [1, 1], "hardswish")
    torch.library.opcheck(torch.ops.steadytorch.thin_conv2d.default, arguments)


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    tensors = ordinary()
    expected = thin_conv2d(*tensors, 1, 1)
    with Watch() as watch:
        found = thin_conv2d(*tensors, 1, 1)
    assert watch.seen[0] is thin_conv2d
    assert torch.equal(found, expected)


def test_transformations_of_functions_are_those_of_pytorch():
    x, weight, bias = ordinary(dtype=torch.float64)
    found = torch.func.grad(lambda x: thin_conv2d(x, weight, bias, 1, 1).sum())(x)
    expected = torch.func.grad(lambda x: eager(x, weight, bias, 1, 1, 1).sum())(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        *(((32, 3, 3, 3), True), ((16, 1, 1, 3), True), ((128, 4, 8, 8), True)),
        *(((32, 5, 3, 3), False), ((32, 3, 1, 1), False), ((1, 3, 3, 3), False)),
        *(((129, 3, 3, 3), False), ((32, 3, 10, 10), False), ((32, 3, 3), False)),
    ],
)
def test_what_is_thin(kernel, expected):
    assert is_thin(torch.Size(kernel)) is expected


@pytest.mark.parametrize(("batch", "rows"), [(1, 32), (2, 64), (4, 128), (64, 128)])
def test_of_few_images_programs_are_small_and_every_core_has_two(batch, rows):
    tile = tile_for(batch * 112 * 112, 32, 27, CORES)
    assert tile == SmallChannelTile(rows, 32, 32)
    assert -(-batch * 112 * 112 // rows) >= CORES


@pytest.mark.parametrize(
    ("outputs", "columns"), [(2, 16), (16, 16), (24, 32), (32, 32), (40, 64), (64, 64), (96, 32)]
)
def test_few_outputs_are_computed_in_vain(outputs, columns):
    assert tile_for(10**6, outputs, 27, CORES).columns == columns
