from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.cudnn_benchmark import CudnnBenchmark
from steadytorch.workload.workload import Workload


def switches() -> tuple[bool, int | None]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit


@pytest.mark.parametrize("limit", [10, 0])
def test_it_is_on_during_a_call_and_as_before_between_calls(limit):
    before = switches()
    variant = CudnnBenchmark(CudnnBenchmark.Parameters(limit))
    with variant.applied(Workload(switches, ())) as changed:
        assert changed.model() == (True, limit)
        assert switches() == before


def test_it_is_as_before_after_a_call_that_raises():
    def fails():
        raise ZeroDivisionError

    before = switches()
    with CudnnBenchmark().applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert switches() == before


def test_a_convolution_on_a_gpu_with_cudnn_will_do(gpu, on_gpu):
    assert CudnnBenchmark().applies_to(on_gpu(nn.Conv2d(3, 4, 3)), gpu) == Applicable()


def test_a_model_without_convolution_is_refused(gpu, on_gpu):
    answer = CudnnBenchmark().applies_to(on_gpu(nn.Linear(2, 2)), gpu)
    assert answer.reason == "the model has no convolution"


def test_a_gpu_without_cudnn_is_refused(on_gpu):
    bare = DeviceFacts(device="cuda", compute_capability="9.0")
    answer = CudnnBenchmark().applies_to(on_gpu(nn.Conv2d(3, 4, 3)), bare)
    assert answer.reason == "cuDNN is not available"


def test_a_cpu_is_refused(cpu, conv_workload):
    assert CudnnBenchmark().applies_to(conv_workload, cpu).reason == "no CUDA device"
