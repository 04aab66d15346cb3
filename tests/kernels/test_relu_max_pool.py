from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from steadytorch.kernels import relu_max_pool
from steadytorch.kernels.relu_max_pool import relu_max_pool2d

from .watching import Watch

NAN, INF = float("nan"), float("inf")
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# shape of the input; kernel, stride, padding, dilation, ceil mode
CASES = {
    "halves": ((2, 3, 8, 8), (2, 2), (2, 2), (0, 0), (1, 1), False),
    "the stem of a ResNet": ((1, 5, 12, 14), (3, 3), (2, 2), (1, 1), (1, 1), False),
    "ceil mode, odd sizes": ((1, 5, 7, 9), (3, 3), (2, 2), (1, 1), (1, 1), True),
    "a large window": ((1, 2, 11, 13), (6, 5), (1, 3), (3, 2), (1, 1), False),
    "dilated": ((2, 2, 9, 10), (2, 3), (2, 1), (1, 1), (2, 3), True),
    "gaps between windows": ((1, 2, 9, 9), (2, 1), (3, 4), (0, 0), (1, 1), False),
    "one window": ((3, 4, 5, 6), (5, 6), (5, 6), (0, 0), (1, 1), False),
    "pairs, odd sizes": ((2, 3, 7, 9), (3, 2), (1, 2), (1, 0), (1, 1), True),
    "pairs, lines apart": ((1, 2, 9, 6), (2, 2), (2, 2), (1, 0), (3, 1), False),
    "longer than a block": ((1, 1, 4, 700), (2, 2), (2, 2), (0, 0), (1, 1), False),
}


def eager(x, *window):
    return F.max_pool2d(x.relu(), *window)


def random(shape, dtype=torch.float32, layout="first", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.to(memory_format=LAYOUTS[layout])


def fused(x, *window):
    """The launcher itself, on any device."""
    found = relu_max_pool.prepared(
        x.shape, relu_max_pool.is_channels_last(x), x.dtype, x.device, *window
    )
    return None if found is None else found(x)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("interpreted")
class TestInterpreted:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize(
        ("shape", "window"), [(c[0], c[1:]) for c in CASES.values()], ids=CASES
    )
    def test_values_are_those_of_float64(self, shape, window, dtype, layout):
        x = random(shape, dtype, layout)
        found, expected = fused(x, *window), eager(x.double(), *window)
        assert found.dtype == dtype
        same(found.double(), expected)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("window", [c[1:] for c in CASES.values()][:3], ids=list(CASES)[:3])
    def test_the_layout_is_kept_as_pytorch_keeps_it(self, window, layout):
        x = random((2, 4, 9, 8), layout=layout)
        assert fused(x, *window).stride() == eager(x, *window).stride()

    @pytest.mark.parametrize("special", [NAN, INF, -INF, -0.0])
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_special_values_spread_as_in_pytorch(self, special, dtype):
        x = random((1, 2, 9, 9), dtype)
        x[0, 0, 4, 4] = special
        x[0, 1] = special
        window = CASES["the stem of a ResNet"][1:]
        same(fused(x, *window), eager(x, *window))

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_window_that_pytorch_takes(self, data):
        def pair(low, high):
            return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

        kernel = pair(1, 4)
        padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
        window = (kernel, pair(1, 4), padding, pair(1, 3), data.draw(st.booleans()))
        layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
        x = random((1, data.draw(st.integers(1, 3)), *pair(1, 9)), layout=layout)
        found = fused(x, *window)
        try:
            expected = eager(x, *window)
        except RuntimeError:
            assert found is None
        else:
            if found is None:
                assert expected.isinf().any()
            else:
                same(found, expected)


def test_a_window_that_steps_over_every_pixel_is_left_to_pytorch():
    x, window = torch.ones(1, 1, 1, 1), ((2, 2), (1, 1), (1, 1), (2, 2), False)
    assert fused(x, *window) is None
    assert relu_max_pool2d(x, *window).item() == -INF


@pytest.mark.parametrize("shape", [(70000, 2), (2, 70000)], ids=["in order", "last"])
def test_lines_longer_than_a_grid_are_left_to_pytorch(shape):
    x = torch.zeros(1, shape[0], 2, shape[1])
    if shape[0] > shape[1]:
        x = x.to(memory_format=torch.channels_last)
    assert fused(x, (1, 1), (1, 1), (0, 0), (1, 1), False) is None


def test_outputs_larger_than_32_bits_are_left_to_pytorch():
    shape = torch.Size((2**20, 2, 32, 31))
    window = ((1, 1), (1, 1), (1, 1), (1, 1), False)
    found = relu_max_pool.checked_outputs(shape, torch.float16, relu_max_pool.Window(*window))
    assert found is None


@pytest.mark.parametrize(
    "x",
    [
        random((2, 3, 8, 8)),
        random((2, 3, 8, 8), layout="last"),
        random((2, 3, 8, 8)).double(),
        random((2, 3, 8, 8)).mT,
        random((2, 3, 8, 16))[..., ::2],
        random((3, 8, 8)),
        random((0, 3, 8, 8)),
        torch.full((1, 1, 4, 4), NAN),
        torch.full((1, 1, 4, 4), -0.0),
        torch.randint(-9, 9, (1, 2, 6, 6)),
    ],
    ids=["order", "last", "double", "mT", "gaps", "3d", "empty", "nan", "-0.0", "integers"],
)
def test_on_the_cpu_it_is_pytorchs_own(x):
    found, expected = relu_max_pool2d(x, 3, 2, 1), eager(x, 3, 2, 1)
    same(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((1, 1, 2, 2), {"kernel_size": 3}),
        ((1, 1, 8, 8), {"kernel_size": 2, "padding": 2}),
        ((1, 1, 8, 8), {"kernel_size": 2, "stride": 0}),
        ((1, 0, 8, 8), {"kernel_size": 2}),
        ((8, 8), {"kernel_size": 2}),
    ],
    ids=["window too large", "padding too large", "no stride", "no channels", "2d"],
)
def test_what_pytorch_refuses_is_refused_in_its_words(shape, window):
    with pytest.raises(RuntimeError) as expected:
        F.max_pool2d(torch.ones(shape), **window)
    with pytest.raises(RuntimeError) as found:
        relu_max_pool2d(torch.ones(shape), **window)
    assert str(found.value) == str(expected.value)


def test_the_stride_is_the_kernels_size_where_none_is_given():
    x = random((1, 2, 9, 9))
    assert torch.equal(relu_max_pool2d(x, (3, 2)), eager(x, (3, 2)))


# PyTorch compiles its rules for tangents with torch.jit.script, which it deprecates.
derives = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@derives
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vmap(f)(x[None])[0],
        lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_transformations_of_functions_are_those_of_pytorch(transform):
    x = random((2, 3, 9, 9))
    found = transform(lambda x: relu_max_pool2d(x, 3, 2, 1), x)
    assert torch.equal(found, transform(lambda x: eager(x, 3, 2, 1), x))


@derives
def test_dual_numbers_keep_their_tangents():
    from torch.autograd import forward_ad

    x = random((2, 3, 9, 9))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        found = forward_ad.unpack_dual(relu_max_pool2d(dual, 3, 2, 1)).tangent
        expected = forward_ad.unpack_dual(eager(dual, 3, 2, 1)).tangent
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_pytorch(layout):
    x = random((2, 3, 9, 9), layout=layout)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = random((2, 3, 5, 5), seed=1)
    (relu_max_pool2d(ours, 3, 2, 1) * weight).sum().backward()
    (eager(theirs, 3, 2, 1) * weight).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.sampled(every=3)
def test_pytorch_finds_the_operator_well_formed(layout, needs_grad):
    x = random((2, 3, 9, 9), layout=layout).requires_grad_(needs_grad)
    torch.library.opcheck(
        torch.ops.steadytorch.relu_max_pool2d.default, (x, [3, 3], [2, 2], [1, 1], [1, 1], False)
    )


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    x = random((1, 2, 4, 4))
    expected = relu_max_pool2d(x, 2)
    with Watch() as watch:
        found = relu_max_pool2d(x, 2)
    assert watch.seen[0] is relu_max_pool2d
    assert torch.equal(found, expected)
