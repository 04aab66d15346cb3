from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.workload.workload import Workload


@pytest.fixture
def cpu() -> DeviceFacts:
    return DeviceFacts(device="cpu", cores_physical=2, cores_logical=4)


@pytest.fixture
def gpu() -> DeviceFacts:
    """Facts of a GPU, for checks that run nothing on it."""
    return DeviceFacts(
        device="cuda", compute_capability="9.0", cudnn="9.19.0", triton="3.6.0", cuda="13.0"
    )


@pytest.fixture
def conv_workload() -> Workload:
    return sys.modules["steadytorch_transforms_contract"].conv_workload()


@pytest.fixture
def attention_workload() -> Workload:
    return sys.modules["steadytorch_transforms_contract"].attention_workload()


@pytest.fixture
def on_gpu() -> Callable[..., Workload]:
    """Makes workloads whose tensors claim to be on a GPU; they cannot run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def make(model: nn.Module) -> Workload:
        with FakeTensorMode():
            for module in model.modules():
                for name, weight in module._parameters.items():
                    if weight is not None:
                        there = torch.empty(weight.shape, dtype=weight.dtype, device="cuda")
                        module._parameters[name] = nn.Parameter(there)
            return Workload(model.eval(), torch.empty(2, 3, 8, 8, device="cuda"))

    return make
