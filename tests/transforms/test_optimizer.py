"""Which optimizers another implementation may stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import load_facts
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.optimizer import OptimizerStep
from steadytorch.workload.workload import Workload


class OfTheUser(torch.optim.AdamW):
    pass


def answer(optimizer, implementation, *, merge=False, dtype=torch.float32):
    model, x = nn.Linear(4, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)
    made = optimizer([{"params": [p]} for p in model.parameters()])
    workload = Workload.training(model, x, F.cross_entropy, made, targets=torch.arange(2))
    return OptimizerStep(OptimizerStep.Parameters(implementation, merge)).applies_to(
        workload, load_facts("cpu")
    )


@pytest.mark.parametrize("implementation", ["fused", "foreach", "compiled"])
def test_groups_are_merged_for_optimizers_of_pytorch(implementation):
    assert isinstance(answer(torch.optim.AdamW, implementation, merge=True), Applicable)


def test_groups_are_not_merged_for_other_optimizers():
    assert isinstance(answer(OfTheUser, "foreach"), Applicable)
    assert "one by one" in answer(OfTheUser, "foreach", merge=True).reason


def test_a_step_of_float64_parameters_is_not_compiled():
    found = answer(torch.optim.AdamW, "compiled", dtype=torch.float64)
    assert "float64" in found.reason
