from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch.runtime.keys import full_key, key_function
from steadytorch.workload.signature import signature

X = torch.zeros(2, 3)


class Pair(NamedTuple):
    one: Any
    other: Any


class Special(torch.Tensor):
    pass


def complexes():
    return torch.zeros(2, 3, dtype=torch.complex64)


ODD = {
    "negative": (lambda: complexes().conj().imag, "negated lazily"),
    "negative complex": (lambda: torch._neg_view(complexes()), "negated lazily"),
    "conjugate": (lambda: complexes().conj(), "conjugated lazily"),
    "both": (lambda: torch._neg_view(complexes().conj()), "conjugated lazily"),
    "zero": (lambda: torch._efficientzerotensor((2, 3)), "zero without memory"),
    "sparse": (X.to_sparse, "sparse_coo"),
    "sparse rows": (X.to_sparse_csr, "sparse_csr"),
    "mkldnn": (X.to_mkldnn, "_mkldnn"),
    "parameter": (lambda: nn.Parameter(X), "Parameter"),
    "class": (lambda: X.as_subclass(Special), "Special"),
}


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
        "keyword",
        "more",
        "none",
        "tuple",
        "list",
    ],
)
def test_keys_differ_if_signatures_differ(other, key):
    assert key((X,), {}) == key((torch.ones(2, 3),), {})
    assert key(*other) != key((X,), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", None), (0, False), ("1", 1), (2, 3)],
)
def test_constants_with_different_text_have_different_keys(one, other, key):
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
        ((X,), {"y": {"a": [X, 1.5]}}),
        ((OrderedDict(a=X),), {}),
        (({1: X},), {}),
        (({True: X},), {}),
        ((Pair(X, 1),), {}),
        (((X, 1),), {}),
        ((torch.float32,), {}),
        (("torch.float32",), {}),
        (([],), {}),
        (({},), {}),
        ((), {}),
    ]
    for one in calls:
        for other in calls:
            same = signature(*one) == signature(*other)
            assert (key(*one) == key(*other)) == same


def test_the_full_key_does_not_depend_on_the_order_of_keywords():
    one, other = {"a": X, "b": X.double()}, {"b": X.double(), "a": X}
    assert full_key(signature((), one), (), one) == full_key(signature((), other), (), other)


@pytest.mark.parametrize("thing", [object(), {"a": object()}, {X}])
def test_arguments_without_a_signature_have_no_key(thing, key):
    with pytest.raises(Exception, match=r"."):
        key((X, thing), {})


@pytest.mark.parametrize("wrapped", [lambda a: a, lambda a: [{"a": (a,)}]], ids=["bare", "nested"])
@pytest.mark.parametrize(("make", "why"), ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_whose_memory_does_not_hold_its_values_has_no_key(make, why, wrapped, key):
    args = (X, wrapped(make()))
    with pytest.raises(TypeError, match=why):
        key(args, {})
    with pytest.raises(TypeError, match=why):
        full_key(signature(args), args, {})


@pytest.mark.parametrize("made", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.complex64)])
def test_a_lazy_tensor_that_is_resolved_has_a_key(made, key):
    lazy = torch._neg_view(made.conj())
    assert key((lazy.resolve_conj().resolve_neg(),), {}) == key((made,), {})


TENSORS = st.builds(
    lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.sampled_from(["cpu", "meta"]),
)
VIEWS = st.builds(lambda x, turn: x.mT if turn and x.dim() > 1 else x, TENSORS, st.booleans())
CALLS = st.lists(VIEWS, max_size=3).map(tuple)
# Few values of each type, so that equal ones are drawn.
PLAIN = st.one_of(
    VIEWS,
    st.sampled_from([None, True, False, 0, 1, -1, 2**63, 1 << 70]),
    st.sampled_from([0.0, -0.0, 1.0, 0.1, float("inf"), float("nan"), -float("nan")]),
    st.sampled_from(["", "a", "b", "ab", "a\0", "\xe4", "\u4e2d", "\U0001f600", "aaaaaaaa"]),
    st.sampled_from([b"a", 1j, -1j, torch.float32, torch.float16, torch.device("cpu")]),
)
NAMES = st.sampled_from(["a", "b", "ab", ""])
TREES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(NAMES, inner, max_size=2),
        st.dictionaries(NAMES, inner, max_size=2).map(OrderedDict),
        st.dictionaries(st.sampled_from([0, 1, "a"]), inner, max_size=2),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=4,
)
NESTED = st.tuples(
    st.lists(TREES, max_size=2).map(tuple), st.dictionaries(NAMES, TREES, max_size=2)
)


@given(CALLS, CALLS)
def test_both_ways_tell_the_same_calls_apart(compiled_host, one, other):
    interpreted, compiled = key_function(None), key_function(compiled_host)
    same = interpreted(one, {}) == interpreted(other, {})
    assert (compiled(one, {}) == compiled(other, {})) == same


@given(NESTED, NESTED)
def test_equal_keys_are_of_equal_signatures_and_devices(compiled_host, one, other):
    wholes = [full_key(signature(*call), *call) for call in (one, other)]
    for key in (key_function(None), key_function(compiled_host)):
        keys = [key(*call) for call in (one, other)]
        hash(keys[0])
        assert keys[0] != keys[1] or wholes[0] == wholes[1]
        assert key(*one) == keys[0]  # nothing is a new signature at each call
        # The order of names is no part of a signature, but may be one of a key.
        if [*one[1]] == [*other[1]]:
            assert (keys[0] == keys[1]) == (wholes[0] == wholes[1])


def test_not_a_number_is_one_value_and_the_zeros_are_two(key):
    def keyed(number):
        return key((X, [number]), {})

    odd = struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0]
    assert keyed(float("nan")) == keyed(-float("nan")) == keyed(odd)
    assert keyed(0.0) != keyed(-0.0)
    assert keyed(complex(0.0, -0.0)) != keyed(0j)
    assert keyed(1e16) != keyed(10**16)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_compiled_keys_are_of_tensors_and_plain_values(compiled_host):
    deep = X
    for _ in range(30):
        deep = [deep]
    for args, kwargs in [
        *[((), {}), ((X,), {"y": X}), ((X, 1), {}), (([X],), {}), ((deep,), {})],
        ((None, True, 1, 1.5, "a", {"a": (X, [X])}), {}),
    ]:
        assert compiled_host.key(args, kwargs) is not None
        assert compiled_host.clear_key(args, kwargs) == compiled_host.key(args, kwargs)
    for _ in range(5):
        deep = [deep]
    endless = []
    endless.append(endless)
    odd = [make() for make, _ in ODD.values()]
    for thing in [object(), b"a", 1 << 63, {1: X}, Pair(X, X), deep, endless, torch.float32, *odd]:
        assert compiled_host.key((X, thing), {}) is None
        assert compiled_host.clear_key((X,), {"a": [thing]}) is None
    assert compiled_host.key([X], {}) is None
    with pytest.raises(TypeError):
        compiled_host.key((X,))
    with pytest.raises(TypeError):
        compiled_host.clear_key()


def test_clear_key_is_none_under_any_obstacle(compiled_host):
    key, clear_key = compiled_host.key, compiled_host.clear_key
    needing = X.clone().requires_grad_()
    assert clear_key((X,), {}) == key((X,), {})
    assert clear_key((X, needing), {}) is None
    assert clear_key((X,), {"a": [{"b": needing}]}) is None
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


def test_nan_is_one_signature(key):
    nan = float("nan")
    assert key((X, nan), {}) == key((X, float("nan")), {})
    assert key((X, [nan]), {}) != key((X, [0.0]), {})
    assert key((X, [-0.0]), {}) != key((X, [0.0]), {})
    assert key((X, {"a": 1}), {}) != key((X, {"a": True}), {})
    assert key((X, {-0.0: 1}), {}) != key((X, {0.0: 1}), {})
