from __future__ import annotations

import pytest
import torch

from steadytorch.transforms.base import Applicable
from steadytorch.transforms.inference_mode import InferenceMode
from steadytorch.workload.workload import Workload


def test_calls_run_in_inference_mode_and_the_time_between_does_not():
    workload = Workload(torch.is_inference_mode_enabled, ())
    with InferenceMode().applied(workload) as changed:
        assert changed.model()
        assert not torch.is_inference_mode_enabled()


def test_a_call_that_raises_leaves_inference_mode():
    def fails():
        raise ZeroDivisionError

    with InferenceMode().applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert not torch.is_inference_mode_enabled()


def test_training_is_refused(cpu, conv_workload):
    training = Workload.training(
        conv_workload.model, conv_workload.inputs, torch.sum, torch.optim.SGD
    )
    assert "no gradients" in InferenceMode().applies_to(training, cpu).reason
    assert InferenceMode().applies_to(conv_workload, cpu) == Applicable()
