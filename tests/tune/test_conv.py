from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.process.worker import WorkerFault
from steadytorch.tune.conv import _found, choose_engines
from steadytorch.workload.workload import Workload


def workload() -> Workload:
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    return Workload(nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8))


def test_equal_convolutions_are_one_problem_with_the_names_of_all():
    found = {problem.epilogue: names for problem, names in _found(workload()).items()}
    assert found == {"bias_relu": ["0"], "bias": ["2", "3"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_gpu_is_a_fault_with_its_reason():
    with pytest.raises(WorkerFault) as found:
        choose_engines(workload(), device="cuda", deadline_s=5)
    assert found.value.reason
