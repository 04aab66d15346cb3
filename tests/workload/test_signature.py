from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.results.signature import Leaf, Signature
from steadytorch.workload.signature import map_tensors, signature, tensors_of

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


def test_a_tensor_is_known_by_its_layout():
    (leaf,) = signature((torch.zeros(2, 3).T,)).leaves
    assert leaf == Leaf("[0]", (3, 2), "float32", (1, 3), "cpu")


def test_values_of_tensors_do_not_matter():
    assert signature((torch.zeros(2),)) == signature((torch.ones(2),))


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(3),),
        (torch.zeros(2, dtype=torch.int64),),
        (torch.zeros(4)[::2],),
        (torch.zeros(2), None),
        ([torch.zeros(2)],),
    ],
    ids=["shape", "dtype", "stride", "another argument", "nesting"],
)
def test_calls_that_differ_have_signatures_that_differ(other: tuple):
    assert signature(other) != signature((torch.zeros(2),))


def test_constants_are_told_apart_by_value():
    assert signature((torch.zeros(2), True)) != signature((torch.zeros(2), 1))


def test_the_order_of_keyword_arguments_does_not_matter():
    a, b = torch.zeros(2), torch.zeros(3)
    assert signature((), {"a": a, "b": b}) == signature((), {"b": b, "a": a})


def test_a_keyword_argument_is_not_a_positional_one():
    assert signature((torch.zeros(2),)) != signature((), {"x": torch.zeros(2)})


def test_a_leaf_is_named_by_where_it_stands():
    found = signature((torch.zeros(1), {"mask": [torch.zeros(1)]}), {"scale": 2.0})
    assert [leaf.path for leaf in found.leaves] == ["[0]", "[1]['mask'][0]", "['scale']"]


def test_a_sparse_tensor_has_no_stride():
    assert signature((torch.eye(2).to_sparse(),)).leaves[0].stride == ()


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match=r"input \['sampler'\] is a object: inputs may hold"):
        signature((), {"sampler": object()})


def test_text_shows_shapes_and_constants():
    found = signature((torch.zeros(2, 3), torch.tensor(1)), {"scale": 0.5})
    assert str(found) == "2x3:float32, scalar:int64, ['scale']=0.5"


@given(st.lists(st.tuples(shapes, dtypes), max_size=3), st.one_of(st.none(), st.integers()))
def test_survives_json_and_serves_as_a_key(layouts: list, constant: int | None):
    inputs = (*(torch.zeros(shape, dtype=dtype) for shape, dtype in layouts), constant)
    found = signature(inputs)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Signature) == found
    assert {found: 1}[signature(inputs)] == 1


def test_mapping_keeps_the_structure_and_all_that_is_no_tensor():
    tree = ({"a": torch.ones(2)}, [torch.ones(1), "text"], None)
    mapped = map_tensors(lambda t: t.numel(), tree)
    assert mapped == ({"a": 2}, [1, "text"], None)


def test_tensors_are_listed_in_order():
    first, second = torch.zeros(1), torch.zeros(2)
    found = tensors_of(({"a": first}, 3, [second]))
    assert [id(tensor) for tensor in found] == [id(first), id(second)]


Pair = namedtuple("Pair", "a b")


def double(tensor):
    return tensor * 2


@pytest.mark.parametrize(
    "value",
    [
        (1.0,),
        [1.0, (2.0, 3.0)],
        {"a": 1.0, "b": [2.0]},
        Pair(1.0, 2.0),
        OrderedDict(a=1.0, b=2.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_converted_and_the_structure_is_kept(value):
    from torch.utils import _pytree as pytree

    given = pytree.tree_map(torch.tensor, value)
    found = map_tensors(double, given)
    assert type(found) is type(given)
    assert pytree.tree_map(lambda t: t.item() / 2, found) == value


class Listed(list):
    pass


KEPT = [
    *(torch.ones(2, 3).max(0), torch.ones(2, 2).double().slogdet(), torch.Size([2, 3])),
    *((torch.Size([2]), torch.ones(1)), [torch.Size([])], {"shape": torch.Size([4])}),
    *(OrderedDict(shape=torch.Size([4])), Pair(torch.Size([1]), torch.ones(1))),
    *(defaultdict(list, a=torch.ones(1)), deque([torch.ones(1)], maxlen=3)),
    *(Listed([1]), {"b": torch.ones(1), "a": torch.ones(1)}),
]


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_types_of_containers_survive(value):
    def types(tree):
        if isinstance(tree, dict):
            return type(tree), [(key, types(held)) for key, held in tree.items()]
        if isinstance(tree, tuple | list | deque):
            return type(tree), [types(held) for held in tree]
        return type(tree)

    found = map_tensors(double, value)
    assert types(found) == types(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(found, "default_factory", None) == getattr(value, "default_factory", None)


def test_sizes_survive_in_a_whole_graph():
    def step(x):
        return map_tensors(double, (x, [x.shape]))

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert type(compiled(torch.ones(2, 3))[1][0]) is torch.Size


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "mode"])
def test_what_is_no_tensor_is_returned_as_is(value):
    assert map_tensors(double, value) is value
