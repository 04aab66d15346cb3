from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.transforms.base import Applicable
from steadytorch.transforms.cudnn_deterministic import CudnnDeterministic
from steadytorch.workload.workload import Workload


def switch() -> bool:
    return torch.backends.cudnn.deterministic


def test_it_is_on_during_a_call_and_off_between_calls():
    with CudnnDeterministic().applied(Workload(switch, ())) as changed:
        assert changed.model()
        assert not switch()


def test_it_is_off_after_a_call_that_raises():
    def fails():
        raise ZeroDivisionError

    with CudnnDeterministic().applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert not switch()


def test_a_convolution_on_a_gpu_with_cudnn_will_do(gpu, on_gpu):
    assert CudnnDeterministic().applies_to(on_gpu(nn.Conv2d(3, 4, 3)), gpu) == Applicable()


def test_training_is_refused(gpu, on_gpu):
    made = on_gpu(nn.Conv2d(3, 4, 3))
    training = Workload.training(made.model, made.inputs, torch.sum, torch.optim.SGD)
    assert "covers the forward pass" in CudnnDeterministic().applies_to(training, gpu).reason


def test_where_it_is_on_it_would_do_nothing(gpu, on_gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    answer = CudnnDeterministic().applies_to(on_gpu(nn.Conv2d(3, 4, 3)), gpu)
    assert answer.reason == "already on"
