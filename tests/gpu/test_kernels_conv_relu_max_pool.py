"""Convolution, ReLU and max-pooling in one, against float64 and PyTorch's own on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import load_facts
from steadytorch.kernels import conv_relu_max_pool as room
from steadytorch.kernels.conv_relu_max_pool import conv_relu_max_pool2d
from steadytorch.kernels.launch import is_installed
from steadytorch.kernels.stem import CONFIGS
from steadytorch.transforms.base import Applicable, applied_in_order
from steadytorch.transforms.cast_weights import CastWeights
from steadytorch.transforms.channels_last import ChannelsLast
from steadytorch.transforms.cuda_graph import CudaGraph
from steadytorch.transforms.fused_kernels import FusedKernels
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
]

NAN, INF = float("nan"), float("inf")
LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}
# Half a unit in the last place, and of TF32's operands; what sums round comes on top.
ROUNDING = {torch.float32: 4e-3, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# shape of the input, of the weight; stride, padding; padding of the pooling, ceil mode
CASES = {
    "ResNet": ((4, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1, False),
    "one image": ((1, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1, False),
    "GoogLeNet": ((2, 3, 224, 224), (64, 3, 7, 7), 2, 3, 0, True),
    "ShuffleNet": ((5, 3, 224, 224), (24, 3, 3, 3), 2, 1, 1, False),
    "SqueezeNet": ((2, 3, 227, 227), (64, 3, 3, 3), 2, 0, 0, True),
    "odd sizes": ((3, 3, 61, 75), (40, 3, 5, 7), (1, 2), (2, 1), 1, True),
    "one channel": ((8, 1, 28, 28), (32, 1, 5, 5), 1, 2, 1, False),
    "four channels": ((2, 4, 96, 98), (96, 4, 4, 4), 2, 1, 1, False),
    "smaller than the kernel": ((2, 3, 4, 5), (64, 3, 7, 7), 2, 3, 1, False),
    "many images": ((700, 3, 16, 16), (8, 3, 3, 3), 2, 1, 1, False),
}


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    """Lets convolutions of float32 be products of TF32, as PyTorch does unless told otherwise."""
    conv = torch.backends.cudnn.conv
    found = conv.fp32_precision
    conv.fp32_precision = "tf32"
    yield
    conv.fp32_precision = found


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = room.PreparedConvReluMaxPool.__call__
    monkeypatch.setattr(
        room.PreparedConvReluMaxPool,
        "__call__",
        lambda self, *given: count.append(1) or call(self, *given),
    )
    return count


def operands(shape, kernel, dtype=torch.float16, layout="last"):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(shape, scale=1.0):
        values = torch.randn(shape, device="cuda", generator=generator) * scale
        return values.to(dtype)

    x, weight = random(shape), random(kernel, (kernel[1] * kernel[2] * kernel[3]) ** -0.5)
    layout = LAYOUTS[layout]
    return x.to(memory_format=layout), weight.to(memory_format=layout), random(kernel[:1])


def eager(x, weight, bias, stride, padding, pool_padding, ceil_mode):
    y = F.conv2d(x, weight, bias, stride, padding).relu()
    return F.max_pool2d(y, 3, 2, pool_padding, 1, ceil_mode)


def ours(x, weight, bias, stride, padding, pool_padding, ceil_mode, config=""):
    return conv_relu_max_pool2d(
        x, weight, bias, stride, padding, 3, 2, pool_padding, ceil_mode, config
    )


def near(found, tensors, sizes):
    """As PyTorch's own in type and strides; in value as float64, NaN and infinities included."""
    plain = eager(*tensors, *sizes)
    assert (found.dtype, found.stride()) == (plain.dtype, plain.stride())
    wide = [None if t is None else t.double() for t in tensors]
    expected, rounding = eager(*wide, *sizes), ROUNDING[found.dtype]
    torch.testing.assert_close(
        found.double(), expected, rtol=rounding, atol=rounding, equal_nan=True
    )


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [*[(dtype, "last") for dtype in ROUNDING], (torch.float16, "first")],
    ids=str,
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_equals_float64_up_to_rounding(case, dtype, layout, launched):
    tensors = operands(*case[:2], dtype, layout)
    for _ in range(2):
        near(ours(*tensors, *case[2:]), tensors, case[2:])
    assert len(launched) == 2


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration_computes_the_same(config, launched):
    shape, kernel, *sizes = CASES["ResNet"]
    tensors = operands(shape, kernel)
    near(ours(*tensors, *sizes, config=config), tensors, sizes)
    assert launched == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_is_as_near_to_float64_as_pytorchs_own(dtype):
    shape, kernel, *sizes = CASES["ResNet"]
    tensors = operands(shape, kernel, dtype)
    exact = eager(*[t.double() for t in tensors], *sizes)
    errors = [
        (y.double() - exact).norm().item()
        for y in (ours(*tensors, *sizes), eager(*tensors, *sizes))
    ]
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["ResNet", "GoogLeNet", "SqueezeNet", "four channels"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_pixels_that_are_not_finite_are_seen_by_their_own_windows_alone(name, value, dtype):
    shape, kernel, *sizes = CASES[name]
    x, weight, bias = operands(shape, kernel, dtype)
    x[0, 0, 20, 21], x[-1, -1, 0, 0], x[-1, 0, -1, -1] = value, value, value
    found = ours(x, weight, bias, *sizes)
    near(found, (x, weight, bias), sizes)
    assert not found.isfinite().all()
    assert found.isfinite().any()


def test_nan_everywhere_is_nan_everywhere():
    shape, kernel, *sizes = CASES["ResNet"]
    x, weight, bias = operands(shape, kernel)
    assert ours(torch.full_like(x, NAN), weight, bias, *sizes).isnan().all()


def test_no_bias_is_needed(launched):
    shape, kernel, *sizes = CASES["ResNet"]
    x, weight, _ = operands(shape, kernel)
    near(ours(x, weight, None, *sizes), (x, weight, None), sizes)
    assert launched == [1]


@pytest.mark.parametrize("kernel_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_layout_is_pytorchs(layout, kernel_layout, channels, launched):
    x, weight, bias = operands((2, channels, 32, 34), (16, channels, 3, 3), layout=layout)
    weight = weight.contiguous().to(memory_format=LAYOUTS[kernel_layout])
    near(ours(x, weight, bias, 2, 1, 1, False), (x, weight, bias), (2, 1, 1, False))
    assert launched == [1]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, w, b: (x.double(), w.double(), b.double()),
        lambda x, w, b: (x.mT, w, b),
        lambda x, w, b: (x[:0], w, b),
        lambda x, w, b: (x[0], w, b),
        lambda x, w, b: (x, w, b.repeat_interleave(2)[::2]),
    ],
    ids=["float64", "transposed", "empty", "no batch", "bias with gaps"],
)
def test_what_the_program_does_not_take_is_pytorchs_own(make, launched):
    tensors, sizes = make(*operands((2, 3, 32, 32), (16, 3, 3, 3))), (2, 1, 1, False)
    found, expected = ours(*tensors, *sizes), eager(*tensors, *sizes)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert launched == []


def test_float32_is_pytorchs_own_where_it_may_not_be_rounded(launched):
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # the fixture puts it back
    shape, kernel, *sizes = CASES["ResNet"]
    tensors = operands(shape, kernel, torch.float32)
    torch.testing.assert_close(ours(*tensors, *sizes), eager(*tensors, *sizes))
    assert launched == []


def test_more_elements_than_32_bits_number_are_pytorchs_own(launched):
    if torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    x = torch.zeros(2**15 + 1, 1, 256, 256, dtype=torch.float16, device="cuda")
    x[-1, 0, -1, -1] = 3
    weight = torch.ones(1, 1, 2, 2, dtype=torch.float16, device="cuda")
    found = conv_relu_max_pool2d(x, weight, None, 2, 0, 3, 2, 1)
    assert found.flatten()[-1].item() == 3
    assert launched == []


def test_addresses_that_are_not_aligned_are_taken():
    _, weight, bias = operands((1, 3, 32, 32), (16, 3, 3, 3), layout="first")
    flat = operands((1, 1, 1, 1 + 2 * 3 * 32 * 32), (1, 1, 1, 1))[0].flatten()
    for offset in (0, 1, 0):
        x = flat[offset:][: 2 * 3 * 32 * 32].view(2, 3, 32, 32)
        near(ours(x, weight, bias, 2, 1, 1, False), (x, weight, bias), (2, 1, 1, False))


def test_it_runs_on_the_current_stream():
    shape, kernel, *sizes = CASES["ResNet"]
    x, weight, bias = operands(shape, kernel)
    side, zeros = torch.cuda.Stream(), torch.zeros_like(x)
    expected = ours(x, weight, bias, *sizes)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        zeros.copy_(x)
        found = ours(zeros, weight, bias, *sizes)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, expected)


def test_two_runs_give_the_same_bits():
    shape, kernel, *sizes = CASES["ResNet"]
    tensors = operands(shape, kernel)
    assert torch.equal(ours(*tensors, *sizes), ours(*tensors, *sizes))


def test_gradients_are_those_of_pytorch():
    tensors = operands((2, 3, 33, 35), (16, 3, 3, 3), torch.float32)
    both = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
    weight = torch.randn_like(eager(*tensors, 2, 1, 1, False))
    for function, given in zip((ours, eager), both, strict=True):
        (function(*given, 2, 1, 1, False) * weight).sum().backward()
    for one, two in zip(*both, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_is_compiled_along_with_its_neighbours():
    shape, kernel, *sizes = CASES["ResNet"]
    tensors = operands(shape, kernel)

    def step(x, weight, bias):
        return ours(x * 2, weight, bias, *sizes) + 1

    with torch.no_grad():
        found = torch.compile(step, fullgraph=True)(*tensors)
    assert torch.equal(found, step(*tensors))


@pytest.mark.alone
def network() -> Workload:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    model = nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1)).eval()
    model[1].running_mean.normal_()
    return Workload(model, torch.randn(4, 3, 64, 64)).to("cuda")


STEM = FusedKernels.Parameters(stem=True)


def test_the_transform_applies_and_its_graph_is_recorded(launched):
    made = network()
    assert FusedKernels(STEM).applies_to(made, load_facts("cuda")) == Applicable()
    stack = [FusedKernels(STEM), CastWeights(CastWeights.Parameters("fp16")), ChannelsLast()]
    with torch.no_grad(), applied_in_order([*stack, CudaGraph()], made) as fused:
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn_like(made.inputs[0])
            torch.testing.assert_close(fused.model(x), made.model(x), rtol=5e-3, atol=5e-3)
    assert launched
