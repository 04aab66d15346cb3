from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.ambient import ambient, set_ambient
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.tf32 import Tf32
from steadytorch.workload.workload import Workload

OPERATORS = (
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
)


def precisions(*args) -> list[str]:
    found = ambient()
    return [found[name] for name in OPERATORS]


@pytest.fixture
def settings():
    found = ambient()
    yield
    set_ambient(found)


@pytest.mark.parametrize(
    "found", [("none", "tf32", "tf32"), ("ieee", "ieee", "ieee"), ("tf32", "ieee", "tf32")]
)
def test_a_call_runs_in_tf32_and_each_operator_gets_back_what_it_had(found, settings):
    set_ambient(dict(zip(OPERATORS, found, strict=True)))
    with Tf32().applied(Workload(precisions, ())) as changed:
        assert changed.model() == ["tf32", "tf32", "tf32"]
        assert tuple(precisions()) == found


def test_each_operator_gets_back_what_it_had_after_a_call_that_raises(settings):
    def fails():
        raise ZeroDivisionError

    set_ambient({"cudnn.conv.fp32_precision": "ieee"})
    before = precisions()
    with Tf32().applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert precisions() == before


def test_it_applies_to_float32_on_a_gpu_that_has_it(gpu, on_gpu):
    assert Tf32().applies_to(on_gpu(nn.Linear(2, 2)), gpu) == Applicable()


def test_it_would_do_nothing_where_it_is_on(gpu, on_gpu, settings):
    set_ambient(dict.fromkeys(OPERATORS, "tf32"))
    assert Tf32().applies_to(on_gpu(nn.Linear(2, 2)), gpu).reason == "already on"


def test_a_16_bit_workload_is_refused(gpu, on_gpu):
    answer = Tf32().applies_to(on_gpu(nn.Linear(2, 2).bfloat16()), gpu)
    assert answer.reason == "needs float32, the workload computes in bfloat16"


def test_an_old_gpu_is_refused(on_gpu):
    old = DeviceFacts(device="cuda", compute_capability="7.5")
    answer = Tf32().applies_to(on_gpu(nn.Linear(2, 2)), old)
    assert answer.reason == "TF32 needs compute capability 8.0, the GPU has 7.5"


def test_a_cpu_is_refused(cpu, conv_workload):
    assert Tf32().applies_to(conv_workload, cpu).reason == "no CUDA device"


def test_its_precision_is_tf32():
    assert Tf32().precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
