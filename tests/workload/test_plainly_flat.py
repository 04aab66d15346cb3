"""Flattening plain containers quickly gives what pytree gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from steadytorch.workload.opened import plainly_flat
from steadytorch.workload.signature import signature


class Point(NamedTuple):
    x: int
    y: int


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(0, 3), st.text(max_size=2), st.floats(0, 1)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab", max_size=1), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_leaves_are_those_of_pytree(tree):
    flat = plainly_flat(tree)
    assert flat is not None
    assert flat[0] == pytree.tree_leaves(tree)


@given(PLAIN, PLAIN)
def test_nestings_are_equal_where_those_of_pytree_are(one, other):
    a, b = plainly_flat(one), plainly_flat(other)
    assert a is not None
    assert b is not None
    same = pytree.tree_structure(one) == pytree.tree_structure(other)
    assert (a[1] == b[1]) == same


@given(PLAIN)
def test_a_known_nesting_is_described_as_a_new_one(tree):
    assert signature((tree,)) == signature((tree,))
    leaves = pytree.tree_leaves_with_path((tree,))
    assert [leaf.path for leaf in signature((tree,)).leaves] == [
        pytree.keystr(path) for path, _ in leaves
    ]


def test_what_is_not_plain_is_left_to_pytree():
    for tree in (Point(1, 2), {1: 2}, torch.Size([1]), [object()], 1j):
        assert plainly_flat(tree) is None
