from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError
from steadytorch.workload.containers import BorrowedArguments, holds_containers
from steadytorch.workload.workload import Workload

Pair = namedtuple("Pair", "first second")


def kinds(tree: Any) -> Any:
    """Types and items of nested containers, with the identity of their leaves."""
    if isinstance(tree, dict):
        return type(tree), [(key, kinds(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple, deque)):
        return type(tree), [kinds(value) for value in tree]
    return id(tree)


TREES = st.recursive(
    st.builds(torch.ones, st.integers(0, 2)) | st.integers() | st.none() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
    ),
    max_leaves=12,
)


def containers(tree: Any) -> list[Any]:
    found = [tree] if isinstance(tree, (list, dict, deque)) else []
    if isinstance(tree, (list, tuple, dict, deque)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            found += containers(item)
    return found


@given(TREES, st.data())
def test_writes_reach_the_originals_when_they_are_given_back_and_not_before(tree, data):
    before = kinds(tree)
    borrowed = BorrowedArguments(tree)
    assert kinds(borrowed.arguments)[0] == before[0] if isinstance(before, tuple) else True
    assert not borrowed.is_written()
    copies = containers(borrowed.arguments)
    assert not {id(each) for each in copies} & {id(each) for each in containers(tree)}
    if not copies:
        return
    chosen = data.draw(st.sampled_from(copies))
    mark = object()
    if isinstance(chosen, dict):
        chosen["new"] = mark
    else:
        chosen.append(mark)
    assert kinds(tree) == before
    assert borrowed.is_written()
    assert borrowed.give_back() is None
    (written,) = [each for each in containers(tree) if any(item is mark for item in items(each))]
    assert kinds(written)[0] is type(chosen)
    assert len(written) == len(chosen)


def items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


@given(TREES)
def test_what_was_not_written_to_is_left_alone(tree):
    before = kinds(tree)
    borrowed = BorrowedArguments(tree)
    result = borrowed.give_back(borrowed.arguments)
    assert kinds(result) == kinds(tree) == before


def test_a_container_that_is_passed_twice_stays_one():
    shared: list[int] = []
    borrowed = BorrowedArguments((shared, {"also": shared}))
    first, second = borrowed.arguments
    assert first is second["also"]
    first.append(1)
    borrowed.give_back()
    assert shared == [1]


def test_containers_of_the_callers_come_back_within_new_ones():
    inner: list[int] = []
    batch = {"inner": inner}
    borrowed = BorrowedArguments(batch)
    borrowed.arguments["all"] = ([borrowed.arguments["inner"]],)
    result = borrowed.give_back({"same": borrowed.arguments})
    assert result["same"] is batch
    assert batch["all"][0][0] is inner


def test_kinds_of_containers_keep_what_makes_them():
    counts, last = defaultdict(list, a=[1]), deque([1, 2], maxlen=2)
    borrowed = BorrowedArguments((counts, last))
    borrowed.arguments[0]["b"].append(2)
    borrowed.arguments[1].append(3)
    borrowed.give_back()
    assert (dict(counts), counts.default_factory) == ({"a": [1], "b": [2]}, list)
    assert (list(last), last.maxlen) == ([2, 3], 2)


class Own:
    def __init__(self, items):
        self.items = items


@pytest.fixture
def own():
    pytree.register_pytree_node(
        Own, lambda own: (list(own.items), None), lambda items, _: Own(list(items))
    )
    yield Own([1])
    pytree._deregister_pytree_node(Own)


def test_a_container_of_another_class_cannot_be_written_to(own):
    borrowed = BorrowedArguments(([0], own))
    borrowed.arguments[0].append(1)
    assert borrowed.arguments[1] is not own
    borrowed.arguments[1].items.append(2)
    assert borrowed.is_written()
    plain: list[int] = []
    with pytest.raises(UnsupportedError, match="container of a custom class"):
        borrowed.give_back(plain)
    assert own.items == [1]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((torch.ones(1), 1, "a", None, (2, torch.Size([1]))), False),
        (([],), True),
        ((1, (2, {})), True),
        ((deque(),), True),
    ],
)
def test_what_a_call_could_write_to_is_found(values, found):
    assert holds_containers(values) is found


class Appending(torch.nn.Module):
    def forward(self, x, cache):
        cache.append(x)
        return torch.cat(cache)


def test_no_step_of_a_workload_sees_what_another_wrote():
    step = Workload(Appending(), (torch.ones(1), [torch.zeros(1)])).step_function()
    assert [len(step()) for _ in range(3)] == [2, 2, 2]
