from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch.errors import UsageError
from steadytorch.runtime.keys import KeylessError, full_key, key_function, remember_keyless
from steadytorch.workload.signature import signature

X = torch.zeros(2, 3)


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def key(request):
    """The key of a call, in Python's way and by compiled code."""
    compiled = None
    if request.param == "compiled":
        compiled = request.getfixturevalue("compiled_host")
    return key_function(compiled)


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
def test_what_tells_two_signatures_apart_is_in_the_key(other, key):
    assert key((X,), {}) == key((torch.ones(2, 3),), {})
    assert key(*other) != key((X,), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", None), (0, False), ("1", 1), (2, 3)],
)
def test_constants_that_are_told_apart_by_their_text_have_keys_of_their_own(one, other, key):
    assert key((X, one), {}) != key((X, other), {})
    assert key((X,), {"n": one}) != key((X,), {"n": other})


def test_positional_and_keyword_arguments_are_told_apart(key):
    keys = [key((X, 1), {}), key((X,), {"a": 1}), key((X,), {"b": 1})]
    assert len(set(keys)) == 3


def test_keys_are_equal_only_where_signatures_are(key):
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
            assert (key(*one) == key(*other)) == same


def test_the_full_key_does_not_depend_on_the_order_of_keywords():
    one, other = {"a": X, "b": X.double()}, {"b": X.double(), "a": X}
    assert full_key(signature((), one), (), one) == full_key(signature((), other), (), other)


@pytest.mark.parametrize("thing", [object(), {"a": object()}, {X}])
def test_what_has_no_signature_has_no_key(thing, key):
    with pytest.raises(Exception, match=r"."):
        key((X, thing), {})


def test_a_tensor_of_a_class_of_its_own_has_no_key(key):
    class Special(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="Special"):
        key((X.as_subclass(Special),), {})


def test_a_sparse_tensor_is_not_taken_for_an_expanded_one(key):
    dense = torch.zeros(()).expand(2, 3)
    assert dense.stride() == X.to_sparse().stride()
    assert key((dense,), {}) != key((X.to_sparse(),), {})
    with pytest.raises(TypeError, match="sparse"):
        full_key(signature((dense,)), (X.to_sparse(),), {})


def test_a_parameter_has_no_key_since_freezing_would_make_it_a_constant(key):
    parameter = nn.Parameter(X)
    for args in ((parameter,), (X, [parameter])):
        with pytest.raises(TypeError, match="Parameter"):
            key(args, {})


TENSORS = st.builds(
    lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.sampled_from(["cpu", "meta"]),
)
VIEWS = st.builds(lambda x, turn: x.mT if turn and x.dim() > 1 else x, TENSORS, st.booleans())
CALLS = st.lists(VIEWS, max_size=3).map(tuple)


@given(CALLS, CALLS)
def test_both_ways_tell_the_same_calls_apart(compiled_host, one, other):
    interpreted, compiled = key_function(None), key_function(compiled_host)
    same = interpreted(one, {}) == interpreted(other, {})
    assert (compiled(one, {}) == compiled(other, {})) == same


def test_compiled_keys_are_of_tensors_that_are_given_by_their_places(compiled_host):
    assert compiled_host.key((X,), {}) is not None
    assert compiled_host.key((X, X.double()), {}) is not None
    for args, kwargs in [((), {}), ((X,), {"y": X}), ((X, 1), {}), (([X],), {}), ([X], {})]:
        assert compiled_host.key(args, kwargs) is None
        assert compiled_host.clear_key(args, kwargs) is None
    with pytest.raises(TypeError):
        compiled_host.key((X,))
    with pytest.raises(TypeError):
        compiled_host.clear_key()


def test_a_call_is_clear_only_where_nothing_stands_between_it_and_its_operators(compiled_host):
    key, clear_key = compiled_host.key, compiled_host.clear_key
    needing = X.clone().requires_grad_()
    assert clear_key((X,), {}) == key((X,), {})
    assert clear_key((X, needing), {}) is None
    with torch.no_grad():
        assert clear_key((X, needing), {}) == key((X, X), {})
    with torch.inference_mode():
        assert clear_key((X, torch.zeros(2, 3)), {}) == key((X, X), {})
    with torch.autocast("cpu", torch.bfloat16):
        assert clear_key((X,), {}) is None
        with torch.autocast("cpu", enabled=False):
            assert clear_key((X,), {}) == key((X,), {})
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert (clear_key((X,), {}) is None) == torch.cuda.is_available()
    seen = []
    torch.vmap(lambda x: seen.append((clear_key((x,), {}), clear_key((X,), {}))) or x)(X)
    torch.func.grad(lambda x: seen.append((clear_key((x,), {}), None)) or x.sum())(X)
    assert seen == [(None, None), (None, None)]
    assert clear_key((X,), {}) == key((X,), {})


# -- lazy bits, and arguments of no signature ----------------------------------------------------

Z = torch.randn(2, 3, dtype=torch.complex64)
LAZY = {"negative": Z.conj().imag, "conjugate": Z.conj()}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize(
    "call", [lambda t: ((t,), {}), lambda t: ((X, [{"a": t}]), {}), lambda t: ((), {"a": t})]
)
def test_what_is_negated_or_conjugated_when_it_is_read_has_no_key(name, call, key):
    args, kwargs = call(LAZY[name])
    with pytest.raises(TypeError, match="negated or conjugated"):
        key(args, kwargs)
    with pytest.raises(TypeError, match="negated or conjugated"):
        full_key(signature(args, kwargs), args, kwargs)
    resolved = LAZY[name].resolve_conj().resolve_neg()
    assert key(*call(resolved)) is not None


def test_numbers_that_equal_nothing_are_one_signature(key):
    nan = float("nan")
    assert key((X, nan), {}) == key((X, float("nan")), {})
    assert key((X, [nan]), {}) != key((X, [0.0]), {})
    assert key((X, [-0.0]), {}) != key((X, [0.0]), {})
    assert key((X, {"a": 1}), {}) != key((X, {"a": True}), {})
    assert key((X, {1: 1}), {}) != key((X, {True: 1}), {})


def test_a_class_without_a_signature_is_refused_without_another_look(key):
    class Own:
        pass

    args = (X, Own())
    with pytest.raises(UsageError) as raised:
        key(args, {})
    remember_keyless(args, {}, str(raised.value))
    with pytest.raises(KeylessError, match="is a Own"):
        key((X, [Own()]), {})
    assert key((X,), {}) is not None
