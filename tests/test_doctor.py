from __future__ import annotations

import pytest
import torch

import steadytorch as steady
from steadytorch.doctor import CheckUp


def test_it_looks_this_machine_over():
    found = steady.doctor("cpu")
    assert isinstance(found, CheckUp)
    assert found.environment.device == "cpu"
    assert found.environment.torch == torch.__version__
    assert found.state.device == "cpu"
    assert found.noise_floor.pairs > 0
    assert found.noise_floor.a_a_spread >= 0
    assert {each.name for each in found.observability} >= {"OpenVINO", "CPU steal"}
    assert found.benchmark_mode.benchmark is torch.backends.cudnn.benchmark


def test_a_device_that_is_none_is_refused():
    with pytest.raises(steady.UsageError, match="tpu"):
        steady.doctor("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(steady.UnsupportedError, match="not available"):
        steady.doctor("cuda")
