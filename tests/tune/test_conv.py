from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.process.worker import WorkerFault
from steadytorch.transforms.base import TransformSpec
from steadytorch.tune.conv import _found, choose_engines, with_engines
from steadytorch.workload.workload import Workload


def workload() -> Workload:
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    return Workload(nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8))


def test_equal_convolutions_are_one_problem_with_the_names_of_all():
    found = {problem.epilogue: names for problem, names in _found(workload()).items()}
    assert found == {"bias_relu": ["0"], "bias": ["2", "3"]}


def test_engines_are_chosen_where_the_transform_applies():
    others = [TransformSpec("cuda_graph"), TransformSpec("channels_last")]
    ours = TransformSpec("cudnn_engines", (("choices", ""),))
    chosen = TransformSpec("cudnn_engines", (("choices", "text"),))
    assert with_engines([others[0], ours, others[1]], lambda: "text") == [
        others[0],
        chosen,
        others[1],
    ]


def test_they_are_not_asked_for_where_it_does_not():
    def never() -> str:
        raise AssertionError("engines were chosen for nothing")

    assert with_engines([TransformSpec("cuda_graph")], never) == [TransformSpec("cuda_graph")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_gpu_is_a_fault_with_its_reason():
    with pytest.raises(WorkerFault) as found:
        choose_engines(workload(), device="cuda", deadline_s=5)
    assert found.value.reason
