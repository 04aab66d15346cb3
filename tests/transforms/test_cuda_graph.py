from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.transforms.base import Applicable
from steadytorch.transforms.cuda_graph import CudaGraph, _collector_paused, _first_cause
from steadytorch.workload.workload import Workload


def test_an_inference_workload_on_a_gpu_will_do(gpu, on_gpu):
    assert CudaGraph().applies_to(on_gpu(nn.Linear(2, 2)), gpu) == Applicable()


def test_training_is_refused(gpu, on_gpu):
    made = on_gpu(nn.Linear(2, 2))
    training = Workload.training(made.model, made.inputs, torch.sum, torch.optim.SGD)
    assert "no gradients" in CudaGraph().applies_to(training, gpu).reason


def test_a_cpu_is_refused(cpu, conv_workload):
    assert CudaGraph().applies_to(conv_workload, cpu).reason == "no CUDA device"


def test_the_reason_is_the_error_that_came_first():
    def capture():
        try:
            raise RuntimeError("operation not permitted when stream is capturing\ndetails")
        finally:
            raise RuntimeError("capture ended in a bad state")

    with pytest.raises(RuntimeError) as caught:
        capture()
    assert _first_cause(caught.value) == "operation not permitted when stream is capturing"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before_after_recording(enabled):
    import gc

    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with _collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()
