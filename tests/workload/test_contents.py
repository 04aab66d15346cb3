"""Snapshots tell what changed between calls from what was only made anew."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from steadytorch.workload.contents import contents, same

ONE, OTHER = torch.ones(2), torch.ones(2)
EQUAL = [
    (1, 1),
    ("a", "a"),
    (None, None),
    (ONE, ONE),
    ([{"size": 1, "names": ("a", "b")}], [{"size": 1, "names": ("a", "b")}]),
    ({"nested": [1, [2, ONE]]}, {"nested": [1, [2, ONE]]}),
    (deque([1, 2]), deque([1, 2])),
]
DIFFERENT = [
    (1, 2),
    (1, True),
    (1, 1.0),
    (ONE, OTHER),
    ([1, 2], [1, 2, 3]),
    ([1, 2], (1, 2)),
    ({"a": 1}, {"b": 1}),
    ([{"size": 1}], [{"size": 2}]),
    ([[ONE]], [[OTHER]]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ([object()], [object()]),
]


@pytest.mark.parametrize(("before", "after"), EQUAL)
def test_what_is_equal_is_the_same(before, after):
    assert same(contents(before), contents(after))


@pytest.mark.parametrize(("before", "after"), DIFFERENT)
def test_what_differs_is_not(before, after):
    assert not same(contents(before), contents(after))


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value]])
def test_writes_and_draws_are_changes(wrap):
    tensor, generator = torch.zeros(2), random.Random(0)
    for value, change in ((tensor, lambda: tensor.add_(1)), (generator, generator.random)):
        before = contents(wrap(value))
        assert same(before, contents(wrap(value)))
        change()
        assert not same(before, contents(wrap(value)))


def test_an_item_that_is_added_later_is_a_change():
    held = [1]
    before = contents(held)
    held.append(2)
    assert not same(before, contents(held))
