from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.runtime.dispatch import CallCounter, obstacle
from steadytorch.runtime.module import TunedModule

from .conftest import CANDIDATES, entries_of

X = torch.zeros(2, 3)
pytestmark = pytest.mark.usefixtures("host_way")


def test_ticks_of_many_threads_are_all_counted():
    counter = CallCounter()
    threads = [
        threading.Thread(target=lambda: [counter.tick() for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(50):
        counter.value()
    for thread in threads:
        thread.join()
    assert counter.value() == 20_000
    assert counter.value() == 20_000


# -- what must not be served --------------------------------------------------------------------


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


@pytest.fixture
def served(linear, serving):
    """Serves an executor that answers zeros, so that its answers differ from the model's."""
    tuned = TunedModule(linear, serving(CANDIDATES["inference_mode"], torch.ones(2, 3)))
    tuned(torch.ones(2, 3))
    entries_of(tuned)[0].call = lambda x: torch.zeros(2, 2)
    assert tuned(torch.ones(2, 3)).sum() == 0
    return tuned


@pytest.mark.parametrize("is_replay", [False, True])
def test_gradients_are_turned_off_for_all_but_replays(served, is_replay):
    (entry,) = entries_of(served)
    entry.is_replay, entry.call = is_replay, lambda x: torch.is_grad_enabled()
    assert served(torch.ones(2, 3)) is is_replay
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert served(torch.ones(2, 3)) is False


def test_a_replay_does_not_answer_under_autocast_gradients_or_training(served, linear):
    (entry,) = entries_of(served)
    entry.is_replay, x = True, torch.ones(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(served(x), linear(x))
    assert torch.equal(served(x.clone().requires_grad_()), linear(x))
    hits = served.report().hits
    linear.train()
    assert torch.equal(served(x), linear(x))
    assert served.report().hits == hits
    linear.eval()
    assert served(x).sum() == 0
    served._gate.off = "closed"
    assert torch.equal(served(x), linear(x))


def test_an_ordinary_call_has_no_obstacle(served):
    assert obstacle((X,), {"y": X, "n": 1}) is None


def test_gradients_of_a_functional_transform_are_the_models(served, linear):
    found = torch.func.grad(lambda x: served(x).sum())(torch.ones(2, 3))
    assert torch.equal(found, torch.func.grad(lambda x: linear(x).sum())(torch.ones(2, 3)))


def test_under_vmap_the_model_runs(served, linear):
    x = torch.ones(4, 2, 3)
    assert torch.equal(torch.vmap(served)(x), torch.vmap(linear)(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of scripting, which PyTorch uses here
def test_tangents_of_forward_mode_are_the_models(served, linear):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3))
        found = forward_ad.unpack_dual(served(dual)).tangent
        assert torch.equal(found, forward_ad.unpack_dual(linear(dual)).tangent)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tracing
def test_tracing_traces_the_model(served, linear):
    x = torch.ones(2, 3)
    linear.requires_grad_(False)  # the trace holds weights as constants
    traced = torch.jit.trace(lambda x: served(x), x, check_trace=False)
    assert torch.equal(traced(2 * x), linear(2 * x))
    assert served(x).sum() == 0
    assert len(served.report().signatures) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_untouched(serving):
    model = nn.ReLU()
    tuned = TunedModule(model, serving(CANDIDATES["inference_mode"], torch.ones(2)))
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for _ in range(2):
        assert tuned(x).is_nested
    assert tuned.report().hits == 0


@pytest.mark.parametrize(
    "lazy",
    [
        torch.ones(2, 3, dtype=torch.complex64).conj().imag,
        torch._neg_view(torch.ones(2, 3)),
        torch._efficientzerotensor((2, 3)),
    ],
    ids=["imaginary part", "negative", "zero"],
)
def test_lazy_tensors_are_not_served(served, linear, lazy):
    hits = served.report().hits
    for _ in range(2):
        assert torch.equal(served(lazy), linear(lazy))
    report = served.report()
    assert (report.hits, report.fallbacks) == (hits, {"these inputs have no signature": 2})
    assert served(lazy.clone().resolve_neg()).sum() == 0


def test_under_a_dispatch_mode_the_model_runs(served, linear):
    with Mode():
        found = served(torch.ones(2, 3))
    assert torch.equal(found, linear(torch.ones(2, 3)))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is nn.functional.linear else result


def test_under_a_function_mode_the_model_runs(served, linear):
    with Doubling():
        found, expected = served(torch.ones(2, 3)), linear(torch.ones(2, 3))
    assert torch.equal(found, expected)
    assert not torch.equal(found, linear(torch.ones(2, 3)))


def test_a_default_device_is_no_obstacle():
    with torch.device("cpu"):
        assert obstacle((), {}) is None
        with Doubling():
            assert "a mode" in obstacle((), {})


@pytest.mark.parametrize("nested", [False, True])
def test_inputs_that_require_gradients_are_an_obstacle(nested):
    x = torch.zeros(2, requires_grad=True)
    args = ([X, (x,)],) if nested else (X, x)
    assert obstacle(args, {}) == obstacle((), {"x": args}) == "an input requires gradients"
    with torch.no_grad():
        assert obstacle(args, {}) is None
