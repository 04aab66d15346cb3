"""ReLU and max-pooling in one, against PyTorch's own operators on the same GPU: bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import load_facts
from steadytorch.kernels import relu_max_pool
from steadytorch.kernels.launch import is_installed
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.transforms.base import Applicable, applied_in_order
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
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# shape of the input; kernel, stride, padding, dilation, ceil mode
CASES = {
    "halves": ((4, 64, 64, 64), 2, 2, 0, 1, False),
    "the stem of a ResNet": ((2, 64, 112, 112), 3, 2, 1, 1, False),
    "odd sizes": ((3, 5, 37, 61), (3, 2), (2, 3), (1, 0), 1, True),
    "a large window": ((1, 3, 40, 41), 13, 1, 6, 1, False),
    "dilated": ((2, 7, 33, 35), 3, (2, 1), 1, (2, 3), True),
    "one pixel left": ((300, 40, 7, 7), 7, 7, 0, 1, False),
    "long lines": ((1, 2, 3, 5000), 2, 2, 0, 1, False),
    "many channels": ((1, 1500, 4, 4), 2, 2, 0, 1, False),
}


def eager(x, *window):
    return F.max_pool2d(x.relu(), *window)


def special(shape, dtype, layout="first"):
    """Random values with NaN, infinities and zeros of both signs among them."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, device="cuda", generator=generator)
    draw = torch.rand(shape, device="cuda", generator=generator)
    for number, value in enumerate((NAN, INF, -INF, -0.0, 0.0)):
        x[(draw * 200).int() == number] = value
    return x.to(dtype).to(memory_format=LAYOUTS[layout])


def same(found, expected):
    """Equal in type, strides, values and the signs of zeros; NaN only where NaN is expected."""
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    known = ~expected.isnan()
    assert torch.equal(found.signbit() & known, expected.signbit() & known)


@pytest.fixture
def launched(monkeypatch):
    """How many times a program was launched."""
    count = []
    call = relu_max_pool.PreparedReluMaxPool.__call__
    monkeypatch.setattr(
        relu_max_pool.PreparedReluMaxPool,
        "__call__",
        lambda self, x: count.append(1) or call(self, x),
    )
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("shape", "window"), [(c[0], c[1:]) for c in CASES.values()], ids=CASES)
def test_it_equals_pytorchs_own(shape, window, dtype, layout, launched):
    x = special(shape, dtype, layout)
    for _ in range(2):
        same(relu_max_pool2d(x, *window), eager(x, *window))
    assert len(launched) == 2


@pytest.mark.parametrize("value", [NAN, -0.0, 0.0, -INF, INF])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_value_everywhere_equals_pytorchs_own(value, dtype):
    x = torch.full((1, 2, 8, 8), value, dtype=dtype, device="cuda")
    same(relu_max_pool2d(x, 3, 2, 1), eager(x, 3, 2, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.double(),
        lambda x: x.mT,
        lambda x: x[..., ::2],
        lambda x: x[0],
        lambda x: x[:0],
    ],
    ids=["float64", "transposed", "with gaps", "no batch", "empty"],
)
def test_what_the_program_does_not_take_is_pytorchs_own(make, launched):
    x = make(special((2, 3, 16, 16), torch.float32))
    same(relu_max_pool2d(x, 3, 2, 1), eager(x, 3, 2, 1))
    assert launched == []


@pytest.mark.parametrize("make", [lambda x: x.int(), lambda x: x[..., :2]], ids=["int", "narrow"])
def test_what_pytorch_refuses_is_refused_in_its_words(make):
    x = make(special((1, 1, 9, 9), torch.float32).nan_to_num(0, 1, 0))
    with pytest.raises(RuntimeError) as expected:
        eager(x, 3)
    with pytest.raises(RuntimeError) as found:
        relu_max_pool2d(x, 3)
    assert str(found.value) == str(expected.value)


def test_more_elements_than_32_bits_number_are_pytorchs_own(launched):
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.zeros(2**15 + 1, 1, 256, 256, dtype=torch.float16, device="cuda")
    x[-1, 0, -1, -1] = 3
    found = relu_max_pool2d(x, 2)
    assert (found.numel(), found.flatten()[-1].item()) == (x.numel() // 4, 3)
    assert launched == []


def test_addresses_that_are_not_aligned_are_taken():
    flat = special((1 + 2 * 3 * 16 * 16,), torch.float32)
    for offset in (0, 1, 0):
        x = flat[offset:][: 2 * 3 * 16 * 16].view(2, 3, 16, 16)
        same(relu_max_pool2d(x, 2), eager(x, 2))


def test_it_runs_on_the_current_stream():
    side, x = torch.cuda.Stream(), torch.zeros(64, 64, 64, 64, device="cuda")
    relu_max_pool2d(x, 2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(5)
        found = relu_max_pool2d(x, 2)
    torch.cuda.current_stream().wait_stream(side)
    assert (found == 5).all()


def test_gradients_are_those_of_pytorch():
    x = special((2, 3, 17, 17), torch.float32).nan_to_num()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    relu_max_pool2d(ours, 3, 2, 1).pow(2).sum().backward()
    eager(theirs, 3, 2, 1).pow(2).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_pytorch_finds_the_operator_well_formed(needs_grad):
    x = torch.randn(2, 3, 9, 9, device="cuda", requires_grad=needs_grad)
    torch.library.opcheck(
        torch.ops.steadytorch.relu_max_pool2d.default, (x, [3, 3], [2, 2], [1, 1], [1, 1], False)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_is_compiled_along_with_its_neighbours():
    def step(x):
        return relu_max_pool2d(x * 2, 3, 2, 1) + 1

    x = special((2, 8, 32, 32), torch.float32)
    same(torch.compile(step, fullgraph=True)(x), step(x))


def network() -> Workload:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return Workload(nn.Sequential(*layers).eval(), torch.randn(4, 3, 64, 64)).to("cuda")


def test_the_transform_applies_and_gives_the_same_values(launched):
    made = network()
    assert FusedKernels().applies_to(made, load_facts("cuda")) == Applicable()
    with torch.no_grad(), FusedKernels().applied(made) as fused:
        assert torch.equal(fused.model(*made.inputs), made.model(*made.inputs))
    assert len(launched) == 1


def test_the_transform_is_recorded_in_a_graph():
    made = network()
    with torch.no_grad(), applied_in_order([FusedKernels(), CudaGraph()], made) as fused:
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn_like(made.inputs[0])
            assert torch.equal(fused.model(x), made.model(x))


@pytest.fixture
def operated(monkeypatch):
    """How often the operator itself was called, rather than its program alone."""
    count = []
    operator = relu_max_pool.OPERATOR
    call = operator.overload
    monkeypatch.setattr(operator, "overload", lambda *given: count.append(1) or call(*given))
    return count


def test_a_call_that_nothing_watches_leaves_out_the_dispatcher(operated):
    x = special((1, 2, 8, 8), torch.float32)
    relu_max_pool2d(x, 2)
    with torch.no_grad():
        relu_max_pool2d(x.requires_grad_(), 2)
    assert operated == []


def test_subclasses_see_the_operator(operated):
    relu_max_pool2d(nn.Parameter(special((1, 2, 8, 8), torch.float32)), 2)
    assert operated == [1]


def test_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = special((1, 2, 8, 8), torch.float32)
    with Watch():
        relu_max_pool2d(x, 2)
    assert seen == ["steadytorch.relu_max_pool2d.default"]


def test_a_trace_holds_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = special((1, 2, 8, 8), torch.float32)
    graph = make_fx(lambda x: relu_max_pool2d(x, 2))(x).graph
    assert "steadytorch.relu_max_pool2d.default" in [str(node.target) for node in graph.nodes]


def test_transformations_of_functions_are_those_of_pytorch():
    x = special((1, 2, 8, 8), torch.float32).nan_to_num()
    ours = torch.func.grad(lambda x: relu_max_pool2d(x, 2).sum())(x)
    assert torch.equal(ours, torch.func.grad(lambda x: eager(x, 2).sum())(x))
