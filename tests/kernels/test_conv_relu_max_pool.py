from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from steadytorch.kernels import conv_relu_max_pool as room
from steadytorch.kernels import stem
from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d, input_precision
from steadytorch.kernels.stem import Config

from .watching import Watch

NAN, INF = float("nan"), float("inf")
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
ROUNDING = {torch.float32: 4e-3, torch.float16: 1e-3}
"""Half a unit in the last place of the result and, in TF32, of each operand. Not of bfloat16: what
Triton's interpreter multiplies are its bits."""
SMALL = Config(16, 16, 2, 4, 1, 255)
# shape of the input, of the weight; stride and padding; padding of the pooling, ceil mode
CASES = {
    "ResNet": ((2, 3, 18, 20), (8, 3, 7, 7), (2, 2), (3, 3), 1, False),
    "DenseNet, odd sizes": ((1, 3, 19, 17), (24, 3, 7, 7), (2, 2), (3, 3), 1, True),
    "3x3": ((2, 3, 15, 16), (20, 3, 3, 3), (2, 2), (1, 1), 1, False),
    "SqueezeNet": ((1, 3, 17, 21), (8, 3, 3, 3), (2, 2), (0, 0), 0, True),
    "no pooling padding": ((3, 3, 13, 14), (8, 3, 3, 3), (1, 1), (1, 1), 0, False),
    "one channel": ((2, 1, 12, 15), (4, 1, 5, 3), (1, 2), (2, 1), 1, False),
    "two channels": ((1, 2, 12, 15), (4, 2, 4, 3), (2, 1), (1, 0), 1, True),
    "four channels": ((1, 4, 12, 11), (17, 4, 3, 2), (1, 1), (0, 1), 1, False),
    "wide stride": ((2, 3, 26, 25), (6, 3, 5, 5), (4, 4), (2, 2), 0, False),
    "kernel larger than the image": ((2, 3, 3, 4), (4, 3, 7, 7), (2, 2), (3, 3), 1, False),
    "one pixel left": ((5, 3, 7, 7), (4, 3, 7, 7), (2, 2), (0, 0), 1, False),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    """Allows TF32 in float32 convolutions; otherwise there is no kernel for float32."""
    monkeypatch.setattr(
        room, "input_precision", lambda dtype: "tf32" if dtype.itemsize == 4 else "ieee"
    )
    monkeypatch.setitem(stem.CONFIGS, "small", SMALL)


def eager(x, weight, bias, stride, padding, pool_padding, ceil_mode):
    y = F.conv2d(x, weight, bias, stride, padding).relu()
    return F.max_pool2d(y, 3, 2, pool_padding, 1, ceil_mode)


def operands(shape, kernel, dtype=torch.float32, layout="last", biased=True):
    generator = torch.Generator().manual_seed(0)

    def random(shape, scale=1.0):
        values = (torch.randn(shape, generator=generator) * scale).to(dtype)
        return values.to(memory_format=LAYOUTS[layout]) if values.dim() == 4 else values

    scale = (kernel[1] * kernel[2] * kernel[3]) ** -0.5
    return random(shape), random(kernel, scale), random(kernel[:1]) if biased else None


def program(x, weight, bias, stride, padding, pool_padding, ceil_mode, config="small"):
    """The launcher for these on any device, or None."""
    like = (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device)
    pooling = ((3, 3), (2, 2), (pool_padding, pool_padding), ceil_mode, config)
    precision = room.input_precision(x.dtype)
    return room.prepared(*like, bias is not None, precision, stride, padding, *pooling)


def fused(x, weight, bias, *sizes, **options):
    found = program(x, weight, bias, *sizes, **options)
    assert found is not None
    return found(x, weight, bias)


def near(found, tensors, sizes):
    """Assert equality with float64 up to rounding, and equal places of NaN and infinities."""
    wide = [None if t is None else t.double() for t in tensors]
    expected, rounding = eager(*wide, *sizes), ROUNDING[found.dtype]
    torch.testing.assert_close(
        found.double(), expected, rtol=rounding, atol=rounding, equal_nan=True
    )


# What is not finite is multiplied by zero, once, to be found.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.usefixtures("interpreted")
class TestInterpreted:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_values_are_those_of_float64(self, case, dtype, layout):
        tensors = operands(*case[:2], dtype, layout)
        found = fused(*tensors, *case[2:])
        assert found.dtype == dtype
        near(found, tensors, case[2:])

    def test_there_need_not_be_a_bias(self):
        shape, kernel, *sizes = CASES["ResNet"]
        tensors = operands(shape, kernel, biased=False)
        near(fused(*tensors, *sizes), tensors, sizes)

    @pytest.mark.parametrize("config", stem.CONFIGS)
    def test_every_configuration_computes_the_same(self, config):
        shape, kernel, *sizes = CASES["ResNet"]
        tensors = operands(shape, kernel, torch.float16)
        near(fused(*tensors, *sizes, config=config), tensors, sizes)

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("name", ["ResNet", "SqueezeNet", "four channels"])
    def test_a_pixel_that_is_not_finite_is_seen_by_its_own_windows_alone(self, name, value):
        shape, kernel, *sizes = CASES[name]
        tensors = operands(shape, kernel, torch.float16)
        tensors[0][0, 1, 4, 5] = value
        found = fused(*tensors, *sizes)
        near(found, tensors, sizes)
        assert not found.isfinite().all()
        assert found.isfinite().any()

    @pytest.mark.parametrize("which", [1, 2], ids=["weight", "bias"])
    def test_nan_in_what_was_learnt_spreads_as_in_pytorch(self, which):
        shape, kernel, *sizes = CASES["ResNet"]
        tensors = operands(shape, kernel)
        tensors[which][3].fill_(NAN)
        near(fused(*tensors, *sizes), tensors, sizes)

    # Added to minus infinity, too, which stands for columns that there are not.
    @pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning")
    @pytest.mark.parametrize("value", [INF, -INF])
    @pytest.mark.parametrize("pool_padding", [0, 1])
    @pytest.mark.parametrize("size", [7, 8])
    def test_a_bias_that_is_not_finite_is_added_to_what_there_is(self, size, pool_padding, value):
        sizes = ((1, 1), (1, 1), pool_padding, True)
        tensors = operands((2, 3, size, size), (8, 3, 3, 3))
        tensors[2][3].fill_(value)
        near(fused(*tensors, *sizes), tensors, sizes)

    @pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
    def test_sums_beyond_the_type_are_infinite(self):
        shape, kernel, *sizes = CASES["3x3"]
        x, weight, bias = operands(shape, kernel, torch.float16)
        found = fused(x * 2000, weight * 100, bias, *sizes)
        expected = eager(x.double() * 2000, weight.double() * 100, bias.double(), *sizes)
        assert torch.equal(found.isinf(), expected > 65519)
        assert found.isinf().any()

    @pytest.mark.parametrize("sign", [0.0, -0.0])
    def test_zeros_are_positive(self, sign):
        shape, kernel, *sizes = CASES["3x3"]
        x, weight, bias = operands(shape, kernel)
        found = fused(x * sign, weight, bias * sign, *sizes)
        assert torch.equal(found, torch.zeros_like(found))

    @pytest.mark.parametrize("kernel_layout", LAYOUTS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_layout_is_last_where_input_or_weight_is(self, layout, kernel_layout):
        shape, kernel, *sizes = CASES["ResNet"]
        x, weight, bias = operands(shape, kernel, torch.float16, layout)
        weight = weight.contiguous(memory_format=LAYOUTS[kernel_layout])
        found = fused(x, weight, bias, *sizes)
        is_last = found.is_contiguous(memory_format=torch.channels_last)
        assert is_last == ("last" in (layout, kernel_layout))
        near(found, (x, weight, bias), sizes)

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_sizes_that_pytorch_takes(self, data):
        def pair(low, high):
            return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

        channels, layout = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(list(LAYOUTS)))
        tensors = operands(
            (data.draw(st.integers(1, 3)), channels, *pair(1, 12)),
            (data.draw(st.integers(2, 18)), channels, *pair(2, 5)),
            data.draw(st.sampled_from(list(ROUNDING))),
            layout,
        )
        sizes = (pair(1, 3), pair(0, 3), data.draw(st.integers(0, 1)), data.draw(st.booleans()))
        found = program(*tensors, *sizes)
        try:
            eager(*tensors, *sizes)
        except RuntimeError:
            assert found is None
        else:
            near(found(*tensors), tensors, sizes)


def test_tf32_is_used_only_where_cudnn_would_use_it():
    for enabled, allowed in ((True, True), (False, True), (True, False)):
        with torch.backends.cudnn.flags(enabled=enabled, allow_tf32=allowed):
            assert (input_precision(torch.float32) == "tf32") is (enabled and allowed)
            assert input_precision(torch.float16) == "ieee"


def ordinary(layout="last", dtype=torch.float32, biased=True):
    return operands((2, 3, 15, 16), (8, 3, 3, 3), dtype, layout, biased)


SIZES = ((2, 2), (1, 1), 1, False)


@pytest.mark.parametrize(
    "change",
    [
        {"window": (2, 2)},
        {"step": (1, 2)},
        {"pool_padding": (0, 1)},
        {"kernel": torch.Size((8, 3, 1, 3))},
        {"kernel": torch.Size((1, 3, 3, 3))},
        {"kernel": torch.Size((8, 1, 3, 3))},
        {"shape": torch.Size((2, 5, 15, 16)), "kernel": torch.Size((8, 5, 3, 3))},
        {"shape": torch.Size((3, 15, 16))},
    ],
    ids=[
        *("another window", "another step", "uneven padding", "one line"),
        *("one output", "groups", "many channels", "no batch"),
    ],
)
def test_what_is_no_stem_has_no_program(change):
    usual = {
        "shape": torch.Size((2, 3, 15, 16)),
        "kernel": torch.Size((8, 3, 3, 3)),
        "window": (3, 3),
        "step": (2, 2),
        "pool_padding": (1, 1),
    }
    assert room.is_stem(**usual)
    assert not room.is_stem(**(usual | change))


@pytest.mark.parametrize(
    "tensors",
    [
        ordinary(),
        ordinary("first"),
        ordinary(biased=False),
        ordinary(dtype=torch.float64),
        operands((0, 3, 15, 16), (8, 3, 3, 3)),
        (ordinary()[0].mT, *ordinary()[1:]),
        (ordinary()[0][0], *ordinary()[1:]),
    ],
    ids=["last", "order", "no bias", "double", "empty", "transposed", "no batch"],
)
def test_on_the_cpu_it_is_pytorchs_own(tensors):
    found, expected = conv_relu_max_pool2d(*tensors, 2, 1, 3, 2, 1), eager(*tensors, *SIZES)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize(
    "tensors",
    [
        operands((2, 6, 15, 16), (8, 3, 3, 3)),
        operands((2, 3, 1, 1), (8, 3, 5, 5)),
        (ordinary()[0].half(), *ordinary()[1:]),
        (*ordinary()[:2], torch.ones(9)),
    ],
    ids=["channels do not fit", "kernel too large", "two types", "bias does not fit"],
)
def test_what_pytorch_refuses_is_refused_in_its_words(tensors):
    with pytest.raises(RuntimeError) as expected:
        eager(*tensors, *SIZES)
    with pytest.raises(RuntimeError) as found:
        conv_relu_max_pool2d(*tensors, 2, 1, 3, 2, 1)
    assert str(found.value) == str(expected.value)


def test_other_windows_are_pytorchs_own():
    x, weight, bias = ordinary()
    found = conv_relu_max_pool2d(x, weight, bias, kernel_size=(2, 3), ceil_mode=True)
    expected = F.max_pool2d(F.conv2d(x, weight, bias).relu(), (2, 3), ceil_mode=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_pytorch(layout, biased):
    tensors = [t for t in ordinary(layout, torch.float64, biased) if t is not None]
    ours = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    none = () if biased else (None,)
    conv_relu_max_pool2d(*ours, *none, 2, 1, 3, 2, 1).pow(2).sum().backward()
    eager(*theirs, *none, *SIZES).pow(2).sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_gradients_of_one_image_without_a_batch_are_those_of_pytorch():
    x, *others = ordinary(dtype=torch.float64)
    ours, theirs = (x[0].clone().requires_grad_() for _ in range(2))
    conv_relu_max_pool2d(ours, *others, 2, 1, 3, 2, 1).pow(2).sum().backward()
    eager(theirs, *others, *SIZES).pow(2).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_there_are_gradients_under_autocast():
    tensors = [t.requires_grad_() for t in ordinary()]

    def gradients(run):
        with torch.autocast("cpu", torch.bfloat16):
            y = run()
        assert y.dtype == torch.bfloat16
        return torch.autograd.grad(y.float().sum(), tensors)

    ours = gradients(lambda: conv_relu_max_pool2d(*tensors, 2, 1, 3, 2, 1))
    theirs = gradients(lambda: eager(*tensors, *SIZES))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0.1, atol=0.1)


def test_second_gradients_are_those_of_pytorch():
    tensors = [t.requires_grad_() for t in operands((1, 2, 5, 4), (2, 2, 2, 2), torch.float64)]
    assert torch.autograd.gradgradcheck(
        lambda *given: conv_relu_max_pool2d(*given, 1, 1, 3, 2, 1), tensors
    )


def test_only_the_gradients_asked_for_are_computed():
    x, weight, bias = ordinary()
    conv_relu_max_pool2d(x, weight.requires_grad_(), bias, 2, 1, 3, 2, 1).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.sampled(every=3)
def test_pytorch_finds_the_operator_well_formed(needs_grad, biased):
    x, weight, bias = ordinary(dtype=torch.float64, biased=biased)
    arguments = (x.requires_grad_(needs_grad), weight, bias, *[[2, 2], [1, 1], [3, 3], [2, 2]])
    torch.library.opcheck(
        torch.ops.steadytorch.conv_relu_max_pool2d.default, (*arguments, [1, 1], False, "")
    )


def test_functions_overridden_by_modes_and_subclasses_are_seen():
    tensors = ordinary()
    expected = conv_relu_max_pool2d(*tensors, 2, 1, 3, 2, 1)
    with Watch() as watch:
        found = conv_relu_max_pool2d(*tensors, 2, 1, 3, 2, 1)
    assert watch.seen[0] is conv_relu_max_pool2d
    assert torch.equal(found, expected)


def test_transformations_of_functions_are_those_of_pytorch():
    x, weight, bias = ordinary()
    found = torch.func.grad(lambda x: conv_relu_max_pool2d(x, weight, bias, 2, 1, 3, 2, 1).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda x: eager(x, weight, bias, *SIZES).sum())(x))
