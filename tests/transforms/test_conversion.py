from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from steadytorch.transforms.conversion import (
    convert,
    own_device,
    own_dtype,
    with_converted,
)
from steadytorch.workload.workload import Workload

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
    found = convert(double, given)
    assert type(found) is type(given)
    assert pytree.tree_map(lambda t: t.item() / 2, found) == value


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "mode"])
def test_what_is_no_tensor_is_returned_as_is(value):
    assert convert(double, value) is value


def test_a_workload_is_converted_with_its_keyword_arguments():
    workload = Workload(str, (torch.ones(1),), {"mask": torch.ones(1), "causal": True})
    found = with_converted(workload, repr, double)
    assert found.model is repr
    assert found.untouched is str
    assert (found.inputs[0].item(), found.kwargs["mask"].item()) == (2.0, 2.0)
    assert found.kwargs["causal"] is True


def test_the_untouched_model_decides_on_the_type_and_the_device():
    workload = Workload(torch.nn.Linear(2, 2), torch.ones(1, 2))
    changed = workload.with_model(str, (torch.ones(1, 2).bfloat16(),))
    assert changed.dtype == torch.bfloat16
    assert own_dtype(changed) == torch.float32
    assert own_device(changed) == torch.device("cpu")
