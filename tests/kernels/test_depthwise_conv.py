from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from steadytorch.kernels import depthwise_conv as room
from steadytorch.kernels.activations import ACTIVATIONS
from steadytorch.kernels.depthwise_conv import channels_innermost, depthwise_conv2d
from steadytorch.kernels.depthwise_tile import CORES, MOST_VALUES, PATCHES, DepthwiseTile, tile_for

from .watching import Watch

NAN, INF = float("nan"), float("inf")
LAYOUTS = {
    "first": lambda t: t.contiguous(),
    "last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "innermost": channels_innermost,
}
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""A unit in the last place, which Triton's interpreter cuts off where a GPU rounds."""
# shape of the input; kernel; stride, padding and dilation
CASES = {
    "3x3": ((2, 24, 9, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3, stride 2": ((1, 40, 15, 14), (3, 3), (2, 2), (1, 1), (1, 1)),
    "5x5": ((2, 17, 8, 7), (5, 5), (1, 1), (2, 2), (1, 1)),
    "5x5, stride 2": ((1, 72, 12, 13), (5, 5), (2, 2), (2, 2), (1, 1)),
    "7x7": ((1, 96, 9, 8), (7, 7), (1, 1), (3, 3), (1, 1)),
    "3x5, uneven": ((3, 20, 10, 9), (3, 5), (2, 1), (1, 0), (1, 1)),
    "dilated": ((1, 32, 13, 12), (3, 3), (1, 1), (2, 2), (2, 2)),
    "dilated unevenly, stride 2": ((2, 8, 13, 16), (3, 3), (2, 3), (0, 4), (3, 2)),
    "no padding": ((1, 64, 9, 9), (3, 3), (1, 1), (0, 0), (1, 1)),
    "no pixel clipped": ((1, 64, 6, 16), (3, 3), (1, 1), (0, 0), (1, 1)),
    "one line left": ((2, 16, 5, 6), (5, 5), (1, 1), (0, 0), (1, 1)),
    "more padding than image": ((1, 16, 2, 3), (3, 3), (1, 1), (4, 5), (1, 1)),
    "1x1": ((2, 16, 5, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    "two channels": ((2, 2, 6, 5), (1, 3), (1, 1), (0, 1), (1, 1)),
}


def eager(x, weight, bias, stride, padding, dilation, activation=""):
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups=weight.shape[0])
    return ACTIVATIONS[activation](y)


def operands(shape, kernel, dtype=torch.float16, layout="innermost", biased=True, last=True):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, bias = random(*shape), random(shape[1], 1, *kernel), random(shape[1])
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return x, LAYOUTS[layout](weight), bias if biased else None


def program(x, weight, bias, stride, padding, dilation, activation=""):
    """The launcher for these on any device, or None."""
    like = (x.shape, room.is_channels_last(x), weight.shape, weight.stride())
    sizes = (stride, padding, dilation, activation)
    return room.prepared(*like, bias is not None, x.dtype, x.device, *sizes)


def near(tensors, *sizes):
    """Assert equality with float64 up to rounding, and equal places of NaN and infinities."""
    fused = program(*tensors, *sizes)
    assert fused is not None
    found = fused(*tensors)
    wide = [None if t is None else t.double() for t in tensors]
    assert found.dtype == tensors[0].dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        found.double(), eager(*wide, *sizes), rtol=ROUNDING[found.dtype], atol=1e-4, equal_nan=True
    )
    return found


@pytest.fixture
def tiles(monkeypatch):
    """Returns a function that forces a tile, regardless of the rule."""

    def choose(*tile):
        room.prepared.cache_clear()
        monkeypatch.setattr(room, "tile_for", lambda *_: DepthwiseTile(*tile))

    return choose


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # as an exponential may
class TestInterpreted:
    @pytest.fixture(autouse=True)
    def few_programs(self, tiles):
        """Sizes for the interpreter, where each operation of each program costs the same."""
        tiles(2, 4, 16, 16, 4)

    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_values_are_those_of_float64(self, case, dtype):
        near(operands(*case[:2], dtype), *case[2:])

    @pytest.mark.parametrize("patch", PATCHES, ids=str)
    @pytest.mark.parametrize("name", ["3x5, uneven", "dilated unevenly, stride 2", "5x5"])
    def test_every_patch_computes_the_same(self, patch, name, tiles):
        tiles(*patch, 4, 16, 1)
        near(operands(*CASES[name][:2]), *CASES[name][2:])

    @pytest.mark.parametrize("name", ["3x3", "3x3, stride 2", "7x7"])
    def test_cut_up_by_the_rule(self, name, monkeypatch):
        monkeypatch.setattr(room, "tile_for", tile_for)
        room.prepared.cache_clear()
        shape, kernel, *sizes = CASES[name]
        near(operands((1, 20, *shape[2:]), kernel), *sizes)

    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_every_activation_with_and_without_bias(self, activation, biased):
        case = CASES["3x3"]
        near(operands(*case[:2], biased=biased), *case[2:], activation)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_weight_may_lie_as_it_likes(self, layout):
        case = CASES["5x5"]
        near(operands(*case[:2], layout=layout), *case[2:])

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("activation", ["", "relu", "relu6", "sigmoid"])
    def test_a_pixel_that_is_not_finite_is_seen_by_its_own_windows_alone(self, value, activation):
        case = CASES["3x3, stride 2"]
        tensors = operands(*case[:2])
        tensors[0][0, 1, 4, 5] = value
        found = near(tensors, *case[2:], activation)
        assert found[0, 0].isfinite().all()

    @pytest.mark.parametrize("which", [1, 2], ids=["weight", "bias"])
    def test_nan_in_what_was_learnt_stays_in_its_channel(self, which):
        case = CASES["3x3"]
        tensors = operands(*case[:2])
        tensors[which][3] = NAN
        found = near(tensors, *case[2:], "hardswish")
        assert found.isnan().any((0, 2, 3)).nonzero().tolist() == [[3]]

    @pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
    def test_sums_beyond_the_type_are_infinite(self):
        case = CASES["3x3"]
        x, weight, bias = operands(*case[:2])
        x, weight = x * 2000, weight * 100
        found = program(x, weight, bias, *case[2:])(x, weight, bias)
        expected = eager(x.double(), weight.double(), bias.double(), *case[2:]).abs()
        assert torch.equal(found.isinf(), expected > 65519)
        assert found.isinf().any()

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_sizes_that_pytorch_takes(self, data):
        def pair(low, high):
            return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

        shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(2, 40)), *pair(2, 12))
        tensors = operands(shape, pair(1, 5), data.draw(st.sampled_from(list(ROUNDING))))
        sizes = (pair(1, 3), pair(0, 3), pair(1, 3))
        try:
            pixels = eager(*tensors, *sizes).shape[2:].numel()
        except RuntimeError:
            pixels = 0
        if pixels > 1:
            near(tensors, *sizes)
        else:
            assert program(*tensors, *sizes) is None


def ordinary(**options):
    return operands((2, 8, 9, 7), (3, 3), **options)


SIZES = ((1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("tensors", "sizes", "activation"),
    [
        (ordinary(dtype=torch.float32), SIZES, ""),
        (ordinary(dtype=torch.float64), SIZES, ""),
        (ordinary(last=False), SIZES, ""),
        (operands((2, 1, 9, 7), (3, 3)), SIZES, ""),
        (operands((2, 8, 1, 1), (3, 3)), SIZES, ""),
        (operands((2, 8, 9, 9), (9, 9)), SIZES, ""),
        (operands((2, 8, 40, 40), (3, 3)), ((1, 1), (18, 18), (18, 18)), ""),
        (operands((2, 8, 3, 3), (5, 5)), SIZES, ""),
        ((ordinary()[0][0], *ordinary()[1:]), SIZES, ""),
        ((ordinary()[0], torch.ones(16, 1, 3, 3).half(), None), SIZES, ""),
        (ordinary(), ((1,), (1,), (1,)), ""),
        (ordinary(), SIZES, "tanh"),
        (operands((2, 8, 2, 2), (5, 5)), SIZES, ""),
        (ordinary(), ((1, 1), (-1, -1), (1, 1)), ""),
        (ordinary(), ((0, 0), (1, 1), (1, 1)), ""),
    ],
    ids=[
        *("float32", "float64", "in order", "one channel", "one pixel", "many taps"),
        *("taps far apart", "one pixel left", "no batch"),
        *("two outputs a channel", "sizes for all axes", "unknown activation"),
        *("kernel too large", "negative padding", "no stride"),
    ],
)
def test_what_is_not_covered_has_no_program(tensors, sizes, activation):
    assert program(*tensors, *sizes, activation) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "tensors",
    [
        ordinary(),
        ordinary(layout="first", last=False),
        ordinary(layout="last", biased=False),
        ordinary(dtype=torch.float64),
        operands((0, 8, 9, 7), (3, 3)),
        (ordinary()[0].mT, *ordinary()[1:]),
        (ordinary()[0][0], *ordinary()[1:]),
        (ordinary()[0], torch.ones(16, 1, 3, 3).half(), None),
    ],
    ids=[
        *("last", "order", "no bias", "double", "empty", "transposed", "no batch"),
        "two outputs a channel",
    ],
)
def test_on_the_cpu_it_is_pytorchs_own(tensors, activation):
    found = depthwise_conv2d(*tensors, 1, 1, 1, activation)
    y = F.conv2d(*tensors, 1, 1, 1, groups=8)
    expected = ACTIVATIONS[activation](y)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize(
    "tensors",
    [
        (ordinary()[0], torch.ones(8, 2, 3, 3).half(), None),
        operands((2, 8, 1, 2), (5, 5)),
        (ordinary()[0].float(), *ordinary()[1:]),
        (*ordinary()[:2], torch.ones(9).half()),
        (ordinary()[0][0, 0], *ordinary()[1:]),
    ],
    ids=["groups", "kernel too large", "two types", "bias does not fit", "no channels"],
)
def test_what_pytorch_refuses_is_refused_in_its_words(tensors):
    with pytest.raises(RuntimeError) as expected:
        F.conv2d(*tensors, groups=8)
    with pytest.raises(RuntimeError) as found:
        depthwise_conv2d(*tensors)
    assert str(found.value).split(",")[0] == str(expected.value).split(",")[0]


def test_an_activation_that_there_is_not_is_refused():
    with pytest.raises(KeyError, match="tanh"):
        depthwise_conv2d(*ordinary(), activation="tanh")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_pytorch(activation, biased):
    tensors = [t for t in ordinary(dtype=torch.float64, biased=biased) if t is not None]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    none = () if biased else (None,)
    depthwise_conv2d(*ours, *none, 2, 1, 1, activation).pow(2).sum().backward()
    eager(*theirs, *none, 2, 1, 1, activation).pow(2).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_a_tensor_that_the_weight_is_made_of_has_both_gradients():
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    made = x.mean((0, 2, 3)).view(4, 1, 1, 1).expand(4, 1, 3, 3)
    sizes = (1, 1, 1, "silu")
    (expected,) = torch.autograd.grad(eager(x, made, None, *sizes).sum(), x, retain_graph=True)
    (found,) = torch.autograd.grad(depthwise_conv2d(x, made, None, *sizes).sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_tensor_given_twice_has_both_gradients():
    x = torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    sizes = (1, 1, 1, "silu")
    (expected,) = torch.autograd.grad(eager(x, x, None, *sizes).sum(), x)
    (found,) = torch.autograd.grad(depthwise_conv2d(x, x, None, *sizes).sum(), x)
    torch.testing.assert_close(found, expected)


def test_second_gradients_are_those_of_pytorch():
    tensors = [t.requires_grad_() for t in operands((1, 2, 4, 3), (3, 3), torch.float64)]
    assert torch.autograd.gradgradcheck(
        lambda *given: depthwise_conv2d(*given, 1, 1, 1, "silu"), tensors
    )


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias = ordinary(dtype=torch.float64)
    depthwise_conv2d(x, weight.requires_grad_(), bias, 1, 1).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.sampled(every=7)
def test_pytorch_finds_the_operator_well_formed(needs_grad, biased, last):
    x, weight, bias = ordinary(dtype=torch.float64, biased=biased, last=last)
    arguments = (x.requires_grad_(needs_grad), weight, bias, [2, 2], [1, 1], [1, 1], "hardswish")
    torch.library.opcheck(torch.ops.steadytorch.depthwise_conv2d.default, arguments)


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    tensors = ordinary()
    expected = depthwise_conv2d(*tensors, 1, 1)
    with Watch() as watch:
        found = depthwise_conv2d(*tensors, 1, 1)
    assert watch.seen[0] is depthwise_conv2d
    assert torch.equal(found, expected)


def test_transformations_of_functions_are_those_of_pytorch():
    x, weight, bias = ordinary(dtype=torch.float64)
    found = torch.func.grad(lambda x: depthwise_conv2d(x, weight, bias, 1, 1).sum())(x)
    expected = torch.func.grad(lambda x: eager(x, weight, bias, 1, 1, 1).sum())(x)
    assert torch.equal(found, expected)


class TestTile:
    def tile(self, shape, outputs, kernel, stride=1):
        return tile_for(shape, outputs, (kernel, kernel), (stride, stride), (1, 1), CORES)

    @pytest.mark.parametrize("kernel", [3, 5, 7])
    @pytest.mark.parametrize("side", [7, 14, 28, 56])
    def test_of_many_images_patches_are_large_and_fit_the_sides(self, side, kernel):
        tile = self.tile((64, 480, side, side), (side, side), kernel)
        computed = [-(-side // patch) * patch for patch in tile[:2]]
        assert tile.rows * tile.columns >= 14
        assert computed[0] * computed[1] <= side**2 * 8 / 7

    @pytest.mark.parametrize("kernel", [3, 5])
    @pytest.mark.parametrize("channels", [672, 960])
    def test_of_one_small_image_most_cores_have_something_to_do(self, channels, kernel):
        tile = self.tile((1, channels, 7, 7), (7, 7), kernel)
        patches = -(-7 // tile.rows) * -(-7 // tile.columns)
        assert -(-patches // tile.patches) * -(-channels // tile.channels) >= CORES

    @pytest.mark.parametrize(
        ("channels", "expected"), [(480, 64), (144, 32), (96, 32), (72, 16), (24, 16), (2, 16)]
    )
    def test_few_channels_are_computed_in_vain(self, channels, expected):
        assert self.tile((64, channels, 14, 14), (14, 14), 3).channels == expected

    @pytest.mark.parametrize("images", [1, 64])
    @pytest.mark.parametrize("kernel", [1, 3, 5, 7])
    @pytest.mark.parametrize("stride", [1, 2, 4])
    def test_a_thread_has_two_channels_and_the_registers_it_needs(self, images, kernel, stride):
        for channels in (16, 96, 960):
            tile = self.tile((images, channels, 56, 56), (56 // stride,) * 2, kernel, stride)
            assert tile.patches * tile.channels == 64 * tile.warps
            assert tile.rows * tile.columns <= MOST_VALUES
