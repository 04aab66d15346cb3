from __future__ import annotations

import torch

from steadytorch.transforms.conversion import (
    own_device,
    own_dtype,
    with_converted,
)
from steadytorch.workload.workload import Workload


def double(tensor):
    return tensor * 2


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
