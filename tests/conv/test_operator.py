from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch
from faked import GONE, fake_cudnn  # noqa: F401 - a fixture
from torch import nn
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.conv import executables
from steadytorch.conv.choices import Choice
from steadytorch.conv.module import EngineConv
from steadytorch.conv.operator import conv_engine, conv_engine_eagerly


def arguments(layout, groups=2, dtype=torch.float32):
    torch.manual_seed(0)
    made = [torch.randn(s) for s in ((2, 8, 9, 9), (6, 8 // groups, 3, 3), (6,), (2, 6, 9, 9))]
    made = [
        t.to(dtype).contiguous(memory_format=layout if t.dim() == 4 else torch.contiguous_format)
        for t in made
    ]
    tensors = [t.requires_grad_() for t in made]
    return (*tensors, [1, 1], [1, 1], [1, 1], groups, True, "", "", "")


LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])


@LAYOUTS
def test_schema_fake_and_gradients_are_registered_rightly(layout):
    opcheck(torch.ops.steadytorch.conv_engine, arguments(layout))


@LAYOUTS
def test_without_a_gpu_it_is_pytorchs_convolution(layout):
    x, w, b, z, *_ = given = arguments(layout)
    expected = torch.relu(torch.conv2d(x, w, b, padding=1, groups=2) + z)
    torch.testing.assert_close(conv_engine(*given), expected)
    assert conv_engine(*given).stride() == torch.empty_like(expected).stride()


@LAYOUTS
@pytest.mark.sampled(every=2)
def test_gradients_are_right(layout):
    x, w, b, z, *rest = arguments(layout, dtype=torch.float64)
    # Away from the kink of the ReLU, where finite differences are not the gradient.
    assert torch.autograd.gradcheck(
        lambda *t: conv_engine(*t, *rest[:4], False, *rest[5:]), (x, w, b, z)
    )
    out, plain = (
        conv_engine(x, w, b, z, *rest),
        torch.relu(torch.conv2d(x, w, b, padding=1, groups=2) + z),
    )
    seed = torch.randn_like(out)
    for mine, own in zip(
        torch.autograd.grad(out, (x, w, b, z), seed),
        torch.autograd.grad(plain, (x, w, b, z), seed),
        strict=True,
    ):
        torch.testing.assert_close(mine, own)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_relus_gradient_is_pytorchs_where_something_is_not_finite(value):
    def gradient(call, first, seed):
        x = torch.tensor([[[[first, -1.0]]]], requires_grad=True)
        (found,) = torch.autograd.grad(call(x, torch.ones(1, 1, 1, 1)), x, torch.tensor(seed))
        return found

    def ours(x, weight):
        return conv_engine(x, weight, None, None, [1, 1], [0, 0], [1, 1], 1, True, "", "", "")

    def theirs(x, weight):
        return torch.conv2d(x, weight).relu()

    for first, seed in ((value, [[[[1.0, 1.0]]]]), (1.0, [[[[1.0, value]]]])):
        found, expected = gradient(ours, first, seed), gradient(theirs, first, seed)
        torch.testing.assert_close(found, expected, equal_nan=True)


@LAYOUTS
@pytest.mark.parametrize("engines", [("", ""), ("aten", "")])
def test_gradients_of_gradients_are_right(layout, engines):
    x, w, b, _, *rest = arguments(layout, dtype=torch.float64)
    small = (x[:1, :, :4, :4].contiguous(memory_format=layout).detach().requires_grad_(), w, b)
    assert torch.autograd.gradgradcheck(
        lambda *t: conv_engine(*t, None, *rest[:4], False, "", *engines), small, fast_mode=True
    )


@LAYOUTS
def test_the_gradients_operator_is_registered_rightly(layout):
    x, w, _, dy, *_ = arguments(layout)
    named = "last" if layout is torch.channels_last else "first"
    shared = ([2, 8, 9, 9], [6, 4, 3, 3], [1, 1], [1, 1], [1, 1], 2)
    opcheck(torch.ops.steadytorch.conv_engine_grad, (dy, w, *shared, "dgrad", named, ""))
    opcheck(torch.ops.steadytorch.conv_engine_grad, (x, dy, *shared, "wgrad", named, ""))


@pytest.mark.parametrize("engine", ["", "aten"])
def test_all_passes_run_in_the_layout_of_the_first(engine):
    (
        x,
        w,
        *_,
    ) = arguments(torch.channels_last)
    w = w.detach().contiguous().requires_grad_()
    y = conv_engine(x, w, None, None, [1, 1], [1, 1], [1, 1], 2, False, "", engine, engine)
    dx, dw = torch.autograd.grad(y, (x, w), torch.randn(y.shape))
    assert dx.is_contiguous(memory_format=torch.channels_last)
    assert dw.is_contiguous(memory_format=torch.channels_last)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.given = arguments(torch.channels_last)
        self.weight = nn.Parameter(self.given[1].detach())

    def forward(self, x):
        return conv_engine(x, self.weight, None, None, *self.given[4:8], False, "eng1", "", "") + 1


def test_it_is_exported_as_one_operator():
    net, (x, *_) = Net().eval(), arguments(torch.channels_last)
    exported = torch.export.export(net, (x.detach(),))
    assert any("conv_engine" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x.detach()), net(x))


@pytest.mark.parametrize("spatial", [1, 3])
def test_one_and_three_dimensions(spatial):
    x, w = torch.randn(2, 4, *[5] * spatial), torch.randn(3, 4, *[3] * spatial)
    convolution = {1: torch.conv1d, 3: torch.conv3d}[spatial]
    n = [1] * spatial
    found = conv_engine(x, w, None, None, n, n, n, 1, False, "", "", "")
    torch.testing.assert_close(found, convolution(x, w, padding=1))


def posed(batch=2, dtype=torch.float32, seed=0):
    """Channels last, with bias, residual and ReLU, as engines take them."""
    torch.manual_seed(seed)
    made = [torch.randn(s, dtype=dtype) for s in ((batch, 8, 9, 9), (6, 8, 3, 3), (6,))]
    made.append(torch.randn(batch, 6, 9, 9, dtype=dtype))
    last = torch.channels_last
    return [t.contiguous(memory_format=last) if t.dim() == 4 else t for t in made]


def called(x, w, b, z, engine="eng1", relu=True):
    return conv_engine(x, w, b, z, [1, 1], [1, 1], [1, 1], 1, relu, engine, "aten", "aten")


def right(x, w, b, z):
    return torch.relu(torch.conv2d(x, w, b, padding=1) + z)


@pytest.mark.parametrize("dtype", executables.NUMBERS)
def test_an_engine_runs_what_it_was_made_for(cudnn, dtype):
    given = posed(dtype=dtype)
    torch.testing.assert_close([called(*given) for _ in range(3)], [right(*given)] * 3)
    assert len(cudnn.runs) == 3
    assert executables.MISSES == {}


def test_an_engine_that_is_gone_is_one_miss_and_the_other_still_runs(cudnn, caplog):
    given, other = posed(), posed(batch=3)
    for _ in range(2):
        torch.testing.assert_close(called(*given, GONE), right(*given))
        torch.testing.assert_close(called(*other), right(*other))
    assert len(cudnn.runs) == 2
    (problem,) = executables.MISSES
    assert "/i2x8x9x9/" in problem
    (record,) = caplog.records
    assert f"PyTorch runs {problem} in place of {GONE}: this cuDNN has no plan" in record.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, w, b, z: (x.double(), w.double(), b.double(), z.double()), "torch.float64"),
        (lambda x, w, b, z: (x.long(), w.long(), b.long(), z.long()), "torch.int64"),
        (lambda x, w, b, z: (x, w, None, z), "bias False, add True"),
        (lambda x, w, b, z: (x, w, b, z[:1]), "(1, 6, 9, 9)"),
    ],
    ids=["float64", "integers", "an add without bias", "a residual that broadcasts"],
)
def test_what_no_engine_takes_is_a_miss_and_right(cudnn, caplog, change, reason):
    called(*posed())
    x, w, b, z = given = change(*posed())
    torch.testing.assert_close(called(*given), right(x, w, b, z))
    called(*given)
    assert len(cudnn.runs) == 1
    assert reason in next(iter(executables.MISSES.values()))
    assert len(caplog.records) == 1


def test_a_weight_of_another_type_is_refused_as_pytorch_refuses_it(cudnn):
    x, w, b, z = posed()
    called(x, w, b, z)
    with pytest.raises(RuntimeError, match=r"should be the same|same type|dtype"):
        called(x, w.half(), b, z)
    assert len(cudnn.runs) == 1


def test_a_gradient_whose_engine_is_gone_is_a_miss_and_right(cudnn):
    x, w, b, _ = [t.requires_grad_() for t in posed()]
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    y = conv_engine(x, w, b, None, *geometry, False, "aten", GONE, "aten")
    seed = torch.randn_like(y)
    expected = torch.autograd.grad(torch.conv2d(x, w, b, padding=1), (x, w), seed)
    torch.testing.assert_close(torch.autograd.grad(y, (x, w), seed), expected)
    (problem,) = executables.MISSES
    assert problem.startswith("dgrad/none/")


def test_threads_that_call_at_once_get_their_own_results(cudnn):
    barrier, wrong = Barrier(4), []

    def run(seed):
        given = [posed(batch=1 + seed % 2, seed=seed + call) for call in range(3)]
        expected = [right(*each) for each in given]
        barrier.wait()
        for _ in range(30):
            for each, own in zip(given, expected, strict=True):
                if not torch.allclose(called(*each), own, atol=1e-4):
                    wrong.append(seed)

    threads = [Thread(target=run, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cudnn.runs) == 4 * 30 * 3
    assert executables.MISSES == {}


class Seen(TorchDispatchMode):
    """The operators that a mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def eagerly(x, w, b, z):
    return conv_engine_eagerly(
        *(x, w, b, z, [1, 1], [1, 1], [1, 1], 1, True, "eng1", "aten", "aten")
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_a_mode_sees_the_operator_that_is_otherwise_passed_over(recorded):
    given = posed()
    with torch.set_grad_enabled(recorded), Seen() as seen:
        found = eagerly(*given)
    torch.testing.assert_close(found, right(*given))
    assert seen.names[0].startswith("steadytorch.conv_engine")


def test_a_profiler_sees_the_operator():
    # Without `acc_events` PyTorch 2.11 warns that only this cycle's are kept.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        eagerly(*posed())
    assert "steadytorch::conv_engine" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("choice", [Choice("eng1"), Choice("eng1", number="fp16")])
def test_a_convolution_as_a_module_runs_its_engine(cudnn, choice):
    x, w, b, z = posed()
    module = EngineConv(w, b, ((1, 1), (1, 1), (1, 1), 1), True, "conv", None)
    module.choose(choice)
    bound = 0.05 if choice.number else 1e-5
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            torch.testing.assert_close(module(x, z), right(x, w, b, z), atol=bound, rtol=bound)
    assert len(cudnn.runs) == 2
    assert executables.MISSES == {}


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_as_a_module_passes_through_the_compiler_whole():
    x, w, b, z = posed()
    module = EngineConv(w, b, ((1, 1), (1, 1), (1, 1), 1), True, "conv", None)
    module.choose(Choice("eng1"))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        found = torch.compile(module, backend=backend, fullgraph=True)(x, z)
    torch.testing.assert_close(found, right(x, w, b, z))
    (graph,) = graphs
    assert any("conv_engine" in str(node.target) for node in graph.graph.nodes)


def test_a_convolution_as_a_module_is_exported_as_one_operator():
    x, w, b, z = posed()
    module = EngineConv(w, b, ((1, 1), (1, 1), (1, 1), 1), True, "conv", None)
    module.choose(Choice("eng1"))
    with torch.no_grad():
        exported = torch.export.export(module, (x, z))
    assert any("conv_engine" in str(node.target) for node in exported.graph.nodes)
