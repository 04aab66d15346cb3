from __future__ import annotations

from collections import UserDict, namedtuple
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from steadytorch.errors import UsageError
from steadytorch.workload.feed import Batch, Feed, Targeted, first_batch, read_batch

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "one other")


def batches(loader: Any, supervised: bool = False, device: torch.device = CPU) -> Any:
    example = first_batch(loader, supervised)
    return Feed(loader, on_host=True).batches(example, device, supervised)


def numbers(found: Any, count: int) -> list[float]:
    return [batch.inputs[0].flatten()[0].item() for batch in islice(found, count)]


@pytest.mark.parametrize(
    ("given", "inputs", "kwargs"),
    [
        (1, (1,), {}),
        ((1, 2), (1, 2), {}),
        ([1, 2], (1, 2), {}),
        (Pair(1, 2), (1, 2), {}),
        ({"a": 1}, (), {"a": 1}),
        (UserDict(a=1), (), {"a": 1}),
    ],
    ids=["value", "tuple", "list", "named tuple", "dict", "mapping"],
)
def test_a_batch_is_the_models_arguments_in_any_form(given: Any, inputs: Any, kwargs: Any):
    assert read_batch(given, supervised=False) == Batch(inputs, kwargs)
    assert read_batch((given, 7), supervised=True) == Batch(inputs, kwargs, (7,))


@pytest.mark.parametrize(
    ("given", "seen"), [(torch.zeros(2), "Tensor"), ((1, 2, 3), "tuple of 3"), ({"a": 1}, "dict")]
)
def test_targets_come_in_a_pair_or_not_at_all(given: Any, seen: str):
    with pytest.raises(UsageError, match=rf"\(inputs, targets\), but the loader gave a {seen}"):
        read_batch(given, supervised=True)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (3, "must be iterable, got a int"),
        (iter([torch.zeros(1)]), "list_iterator, which gives its batches only once"),
        ((torch.zeros(1) for _ in range(2)), "generator, which gives its batches only once"),
        ([], "the loader is empty"),
    ],
    ids=["none", "iterator", "generator", "empty"],
)
def test_a_loader_can_be_begun_anew_and_has_a_batch(loader: Any, why: str):
    with pytest.raises(UsageError, match=why):
        first_batch(loader, supervised=False)


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_steps_go_round_the_batches_that_have_the_shape_of_the_first(sizes: list[int]):
    loader = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    fitting = [float(place) for place, size in enumerate(sizes) if size == sizes[0]]
    assert numbers(batches(loader), 15) == list(islice(cycle(fitting), 15))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(3, 2).t(),
        (torch.zeros(2, 3), torch.zeros(1)),
        {"x": torch.zeros(2, 3)},
        1.0,
    ],
    ids=["dtype", "strides", "count", "keyword", "constant"],
)
def test_what_has_another_signature_is_passed_over(other: Any):
    assert numbers(batches([torch.ones(2, 3), other]), 3) == [1.0, 1.0, 1.0]


def test_constants_are_part_of_the_signature():
    loader = [(torch.ones(1), 2), (torch.zeros(1), 3)]
    assert numbers(batches(loader), 3) == [1.0, 1.0, 1.0]


def test_targets_may_vary_in_shape():
    found = batches([(torch.zeros(1), torch.zeros(n)) for n in (1, 2)], supervised=True)
    assert [len(batch.targets[0]) for batch in islice(found, 4)] == [1, 2, 1, 2]


def test_a_loader_that_has_none_of_these_shapes_any_more_says_so_instead_of_going_on():
    loader = [torch.zeros(1)]
    found = batches(loader)
    next(found)
    loader[0] = torch.zeros(2)
    with pytest.raises(UsageError, match="no batch with the shapes of its first one"):
        next(found)


def test_batches_are_moved_wherever_their_tensors_stand():
    loader = [({"x": [torch.zeros(1)], "mask": None}, (torch.zeros(1), "name"))]
    meta = torch.device("meta")
    example = Batch((), {"x": [torch.zeros(1, device=meta)], "mask": None})
    batch = next(Feed(loader, on_host=True).batches(example, meta, supervised=True))
    ((target, name),) = batch.targets
    assert {batch.kwargs["x"][0].device, target.device} == {meta}
    assert (batch.kwargs["mask"], name) == (None, "name")


def test_a_loaders_exception_comes_where_its_batch_would():
    class Broken:
        def __iter__(self):
            yield torch.zeros(1)
            raise ValueError("broken file")

    found = batches(Broken())
    next(found)
    with pytest.raises(ValueError, match="broken file"):
        next(found)


def test_a_loader_is_let_go_with_its_batches():
    ended = []

    class Watched:
        def __iter__(self):
            try:
                yield from [torch.zeros(1)] * 3
            finally:
                ended.append(True)

    found = batches(Watched())
    next(found)
    ended.clear()  # the one used to read the first batch
    del found
    assert ended == [True]


def test_a_data_loader_goes_on_after_its_last_short_batch():
    loader = DataLoader(TensorDataset(torch.arange(7.0)), batch_size=3)
    assert numbers(batches(loader), 4) == [0.0, 3.0, 0.0, 3.0]


def test_profilers_see_a_loader_at_work():
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        next(batches([torch.zeros(1)]))
    assert "DataLoader" in {event.key for event in profiled.key_averages()}


def test_a_loss_with_targets_of_one_batch_is_a_loss_of_the_output():
    output, targets = torch.randn(3, 2), torch.tensor([0, 1, 1])
    loss = Targeted(functional.cross_entropy, targets)
    assert loss(output) == functional.cross_entropy(output, targets)


def test_targets_are_moved_and_converted_with_a_loss():
    inner = nn.CrossEntropyLoss(torch.ones(2))
    loss = Targeted(
        inner, {"values": [torch.zeros(1)], "classes": torch.zeros(1, dtype=torch.long)}
    )
    loss.double()
    assert inner.weight is not None
    assert {inner.weight.dtype, loss.targets[0]["values"][0].dtype} == {torch.float64}
    assert loss.targets[0]["classes"].dtype == torch.long
    assert loss.to("meta").targets[0]["classes"].device.type == "meta"
