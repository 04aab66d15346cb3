from __future__ import annotations

import pytest
import torch

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.graphs.static_buffers import feeder, results, static_inputs


def test_static_inputs_are_copies_with_the_same_strides():
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    static = static_inputs((x,), {})
    assert static.args[0].stride() == x.stride()
    assert static.args[0].data_ptr() != x.data_ptr()


def test_static_inputs_made_in_inference_mode_can_be_written_to_outside():
    with torch.inference_mode():
        static = static_inputs((torch.ones(2),), {})
    feeder(static)((torch.zeros(2),), {})
    assert static.args[0].tolist() == [0, 0]


def test_a_call_reaches_every_tensor_converted_to_its_type():
    static = static_inputs((torch.zeros(2), 3), {"mask": torch.zeros(2, dtype=torch.bfloat16)})
    feeder(static)((torch.ones(2), 3), {"mask": torch.full((2,), 2.0)})
    assert static.args[0].tolist() == [1, 1]
    assert static.kwargs["mask"].dtype == torch.bfloat16
    assert static.kwargs["mask"].tolist() == [2, 2]


def test_keyword_arguments_may_come_in_any_order():
    static = static_inputs((), {"a": torch.zeros(1), "b": torch.zeros(1)})
    feeder(static)((), {"b": torch.full((1,), 2.0), "a": torch.ones(1)})
    assert (static.kwargs["a"].item(), static.kwargs["b"].item()) == (1, 2)


def test_nested_tensors_are_reached():
    static = static_inputs(([torch.zeros(1), {"x": torch.zeros(1)}],), {"flag": True})
    feeder(static)(([torch.ones(1), {"x": torch.full((1,), 2.0)}],), {"flag": True})
    assert static.args[0][0].item() == 1
    assert static.args[0][1]["x"].item() == 2


def test_inputs_that_need_gradients_leave_the_static_ones_out_of_them():
    static = static_inputs((torch.zeros(2), torch.zeros(2)), {})
    feeder(static)((torch.ones(2, requires_grad=True), torch.ones(2)), {})
    assert not static.args[0].requires_grad


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(1), 3), {"m": torch.ones(2)}),
        ((torch.ones(2), 4), {"m": torch.ones(2)}),
        ((torch.ones(2),), {"m": torch.ones(2)}),
        ((torch.ones(2), 3), {}),
        ((torch.ones(2), 3), {"n": torch.ones(2)}),
    ],
    ids=["broadcast", "constant", "too few", "no keyword", "other keyword"],
)
def test_a_call_of_another_signature_is_refused(args, kwargs):
    static = static_inputs((torch.zeros(2), 3), {"m": torch.zeros(2)})
    with pytest.raises(UsageError, match="the inputs differ from the recorded ones"):
        feeder(static)(args, kwargs)


def test_a_call_nested_otherwise_is_refused():
    static = static_inputs(([torch.zeros(1)],), {})
    with pytest.raises(UsageError, match="nested as"):
        feeder(static)(([torch.zeros(1), torch.zeros(1)],), {})


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(2),
        (torch.zeros(2), torch.ones(2)),
        {"a": torch.zeros(2), "b": [torch.ones(2), 3, None]},
        torch.zeros(2, 2).max(0),
    ],
    ids=["tensor", "tuple", "nested", "named tuple"],
)
def test_collected_outputs_have_the_structure_and_outlive_the_next_call(outputs):
    from torch.utils import _pytree as pytree

    statics = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    place, collect = results(outputs)
    first = collect(place())
    for static in statics:
        static.fill_(9)
    kept = [leaf for leaf in pytree.tree_leaves(first) if isinstance(leaf, torch.Tensor)]
    assert pytree.tree_structure(first) == pytree.tree_structure(outputs)
    assert not any((t == 9).any() for t in kept)
    again = [
        leaf for leaf in pytree.tree_leaves(collect(place())) if isinstance(leaf, torch.Tensor)
    ]
    assert all((t == 9).all() for t in again)


def test_outputs_that_have_a_place_are_not_copied_and_the_others_are():
    one, two, placed = torch.zeros(2), torch.ones(2), torch.full((2,), 5.0)
    place, collect = results({"a": one, "b": (two, "text")}, [lambda: placed, None])
    found = collect(place())
    assert found["a"] is placed
    assert torch.equal(found["b"][0], two)
    assert found["b"][1] == "text"
    assert found["b"][0].data_ptr() != two.data_ptr()
    place, collect = results(one, [lambda: None])  # the place could not be had
    assert collect(place()).data_ptr() != one.data_ptr()
    place, collect = results(one, [lambda: placed])
    assert collect(place()) is placed


class Box:
    hidden = torch.zeros(1)


def test_outputs_hidden_in_an_unknown_object_are_refused():
    with pytest.raises(UnsupportedError, match="Box"):
        results((torch.zeros(1), Box()))
