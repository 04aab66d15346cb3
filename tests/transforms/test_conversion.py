from __future__ import annotations

import torch

from steadytorch.transforms.conversion import Converting, own_device, own_dtype
from steadytorch.workload.workload import Workload


class Recording(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


def double(tensor):
    return tensor * 2


def test_arguments_are_converted_at_each_call_and_the_callers_are_left_alone():
    x, mask = torch.ones(1), torch.ones(1)
    model = Converting(Recording(), double)
    for _ in range(2):
        args, kwargs = model(x, [mask, 7], mask=mask, causal=True)
        assert (args[0].item(), args[1][0].item(), args[1][1]) == (2.0, 2.0, 7)
        assert (kwargs["mask"].item(), kwargs["causal"]) == (2.0, True)
    assert (x.item(), mask.item()) == (1.0, 1.0)


def test_it_is_in_the_mode_of_the_model():
    assert Converting(Recording(), double).training
    assert not Converting(Recording().eval(), double).training


def test_the_untouched_model_decides_on_the_type_and_the_device():
    workload = Workload(torch.nn.Linear(2, 2), torch.ones(1, 2))
    changed = workload.with_model(str, (torch.ones(1, 2).bfloat16(),))
    assert changed.dtype == torch.bfloat16
    assert own_dtype(changed) == torch.float32
    assert own_device(changed) == torch.device("cpu")
