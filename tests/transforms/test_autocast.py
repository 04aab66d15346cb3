from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.transforms.autocast import Autocast
from steadytorch.transforms.base import Applicable
from steadytorch.workload.workload import Workload

BF16 = Autocast(Autocast.Parameters("bf16"))
FP16 = Autocast(Autocast.Parameters("fp16"))


class Seen(nn.Module):
    """A linear layer that remembers the type of its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        y = self.linear(x)
        self.seen = y.dtype
        return y, x


def made(**kwargs):
    return Workload(Seen().eval(), torch.ones(1, 2), **kwargs)


def test_products_are_in_the_type_and_outputs_in_the_workloads_own():
    workload = made()
    with BF16.applied(workload) as cast:
        outputs = cast.model(*cast.inputs)
    assert workload.model.seen == torch.bfloat16
    assert [t.dtype for t in outputs] == [torch.float32, torch.float32]


def test_it_is_off_between_calls():
    workload = made()
    with BF16.applied(workload) as cast:
        cast.model(*cast.inputs)
        assert not torch.is_autocast_enabled("cpu")


def test_it_is_off_after_a_call_that_raises():
    with BF16.applied(made()) as cast:
        with pytest.raises(RuntimeError):
            cast.model(torch.ones(1, 3))
        assert not torch.is_autocast_enabled("cpu")


def test_gradients_reach_the_weights():
    workload = made()
    with BF16.applied(workload) as cast:
        cast.model(*cast.inputs)[0].sum().backward()
    assert workload.model.linear.weight.grad.dtype == torch.float32


def test_training_in_fp16_is_refused(gpu):
    workload = Workload.training(Seen(), torch.ones(1, 2), torch.sum, torch.optim.SGD)
    assert FP16.applies_to(workload, gpu).reason == "training in fp16 needs a gradient scaler"
    assert BF16.applies_to(workload, gpu) == Applicable()


def test_a_float64_workload_is_refused(cpu):
    workload = Workload(Seen().double(), torch.ones(1, 2))
    assert "float64" in BF16.applies_to(workload, cpu).reason
