from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.traces.operands import NotRecordedError, Operands

INPUTS = {
    "dims": [[2, 3, 4], [], [3, 4], [], []],
    "types": ["c10::Half", "float", "long int", "ScalarList", "Scalar"],
    "strides": [[0, 4, 1], [], [4, 1], [], []],
    "concrete": ["", "", "", "[1, 2]", "True"],
}


def test_a_tensor_has_shape_type_and_size():
    given = Operands(INPUTS)
    assert given.shape(2) == (3, 4)
    assert given.elements(2) == 12
    assert given.kind(2) == "long int"
    assert given.bytes(2) == 96


def test_what_is_expanded_lies_in_memory_once():
    assert Operands(INPUTS).elements(0) == 24
    assert Operands(INPUTS).bytes(0) == 24


def test_a_tensor_without_dimensions_is_one_and_a_number_is_none():
    given = Operands(INPUTS)
    assert given.tensors() == [0, 1, 2]
    assert given.shape(1) == ()
    assert given.bytes(1) == 4
    assert not given.is_tensor(4)


def test_a_sparse_tensor_has_no_shape_to_count_by():
    given = Operands({"dims": [[64, 64]], "types": ["float"], "strides": [[]]})
    with pytest.raises(NotRecordedError, match="input 0 is sparse"):
        given.elements(0)


def test_settings_are_read_from_what_was_printed():
    given = Operands(INPUTS)
    assert given.integers(3, 2) == [1, 2]
    assert given.flag(4)


def test_one_integer_stands_for_all_and_none_for_none():
    given = Operands({"types": ["", ""], "concrete": ["[3]", "[]"]})
    assert given.integers(0, 2) == [3, 3]
    assert given.integers(1, 2) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("types", None),
        ("types", ["float"]),
        ("dims", [[2, 3, 4], [], [3, -4]]),
        ("dims", [[2, 3, 4], [], [3, "4"]]),
        ("dims", [[2, 3, 4], [], 3]),
        ("dims", [[1], [], [1] * 100]),
    ],
)
def test_nonsense_is_not_recorded(key, value):
    with pytest.raises(NotRecordedError):
        Operands({**INPUTS, key: value}).shape(2)


def test_settings_of_old_traces_are_not_recorded():
    with pytest.raises(NotRecordedError):
        Operands({"dims": [[1]], "types": ["float"]}).integers(0, 1)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["dims", "types", "strides", "concrete"]), anything))
def test_whatever_a_trace_says_only_that_error_is_raised(inputs):
    given = Operands(inputs)
    asked = [
        given.tensors,
        *(lambda place=place: given.bytes(place) for place in range(3)),
        *(lambda place=place: given.integers(place, 2) for place in range(3)),
        *(lambda place=place: given.flags(place) for place in range(3)),
        *(lambda place=place: given.integer(place) for place in range(3)),
    ]
    for ask in asked:
        try:
            ask()
        except NotRecordedError:
            continue
