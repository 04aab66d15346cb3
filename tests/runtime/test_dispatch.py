from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.runtime.dispatch import Ticks, full_key, obstacle, quick_key
from steadytorch.runtime.module import TunedModule
from steadytorch.workload.signature import signature

from .conftest import CANDIDATES

X = torch.zeros(2, 3)

# -- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        ((X[:1],), {}),
        ((X.T.contiguous().T,), {}),
        ((X.double(),), {}),
        ((X.to("meta"),), {}),
        ((X.to_sparse(),), {}),
        ((), {"x": X}),
        ((X, X), {}),
        ((X, None), {}),
        (((X,),), {}),
        (([X],), {}),
    ],
    ids=[
        "shape",
        "stride",
        "dtype",
        "device",
        "layout",
        "keyword",
        "more",
        "none",
        "tuple",
        "list",
    ],
)
def test_what_tells_two_signatures_apart_is_in_the_key(other):
    assert quick_key((X,), {}) == quick_key((torch.ones(2, 3),), {})
    assert quick_key(*other) != quick_key((X,), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", None), (0, False), ("1", 1), (2, 3)],
)
def test_constants_that_are_told_apart_by_their_text_have_keys_of_their_own(one, other):
    assert quick_key((X, one), {}) != quick_key((X, other), {})
    assert quick_key((X,), {"n": one}) != quick_key((X,), {"n": other})


def test_positional_and_keyword_arguments_are_told_apart():
    keys = [quick_key((X, 1), {}), quick_key((X,), {"a": 1}), quick_key((X,), {"b": 1})]
    assert len(set(keys)) == 3


def test_keys_are_equal_only_where_signatures_are():
    calls = [
        ((X,), {}),
        ((X, X), {}),
        ((X,), {"y": X}),
        ((X,), {"y": 1}),
        (({"a": X},), {}),
        (((X, (X, [1])),), {}),
        ((X, 1.5), {}),
    ]
    for one in calls:
        for other in calls:
            same = signature(*one) == signature(*other)
            assert (quick_key(*one) == quick_key(*other)) == same


def test_the_full_key_does_not_depend_on_the_order_of_keywords():
    one, other = {"a": X, "b": X.double()}, {"b": X.double(), "a": X}
    assert full_key(signature((), one), (), one) == full_key(signature((), other), (), other)


@pytest.mark.parametrize("thing", [object(), {"a": object()}, {X}])
def test_what_has_no_signature_has_no_key(thing):
    with pytest.raises(Exception, match=r"."):
        quick_key((X, thing), {})


def test_a_tensor_of_a_class_of_its_own_has_no_key():
    class Special(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="Special"):
        quick_key((X.as_subclass(Special),), {})


def test_a_sparse_tensor_is_not_taken_for_an_expanded_one():
    dense = torch.zeros(()).expand(2, 3)
    assert dense.stride() == X.to_sparse().stride()
    assert quick_key((dense,), {}) != quick_key((X.to_sparse(),), {})
    with pytest.raises(TypeError, match="sparse"):
        full_key(signature((dense,)), (X.to_sparse(),), {})


def test_a_parameter_has_no_key_since_freezing_would_make_it_a_constant():
    parameter = nn.Parameter(X)
    for args in ((parameter,), (X, [parameter])):
        with pytest.raises(TypeError, match="Parameter"):
            quick_key(args, {})


def test_ticks_of_many_threads_are_all_counted():
    ticks = Ticks()
    threads = [
        threading.Thread(target=lambda: [ticks.tick() for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(50):
        ticks.value()
    for thread in threads:
        thread.join()
    assert ticks.value() == 20_000
    assert ticks.value() == 20_000


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
    """Serves an executor that answers zeros, so that its answers are told from the model's."""
    tuned = TunedModule(linear, serving(CANDIDATES["inference_mode"], torch.ones(2, 3)))
    tuned(torch.ones(2, 3))
    next(iter(tuned._found.values())).call = lambda x: torch.zeros(2, 2)
    assert tuned(torch.ones(2, 3)).sum() == 0
    return tuned


@pytest.mark.parametrize("is_replay", [False, True])
def test_gradients_are_turned_off_for_all_but_replays(served, is_replay):
    (entry,) = served._found.values()
    entry.is_replay, entry.call = is_replay, lambda x: torch.is_grad_enabled()
    assert served(torch.ones(2, 3)) is is_replay
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert served(torch.ones(2, 3)) is False


def test_replays_whose_result_is_no_answer_are_thrown_away(served, linear):
    (entry,) = served._found.values()
    entry.is_replay, x = True, torch.ones(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(served(x), linear(x))
    assert torch.equal(served(x.clone().requires_grad_()), linear(x))
    hits = served.report().hits
    served._model.train()
    assert torch.equal(served(x), linear(x))
    assert served.report().hits == hits
    served._model.eval()
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


def test_under_a_dispatch_mode_the_model_runs(served, linear):
    with Mode():
        found = served(torch.ones(2, 3))
    assert torch.equal(found, linear(torch.ones(2, 3)))


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_that_are_needed_are_an_obstacle(nested):
    x = torch.zeros(2, requires_grad=True)
    args = ([X, (x,)],) if nested else (X, x)
    assert obstacle(args, {}) == obstacle((), {"x": args}) == "gradients of the inputs are needed"
    with torch.no_grad():
        assert obstacle(args, {}) is None
