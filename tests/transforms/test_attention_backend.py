from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.ambient import ambient
from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.attention_backend import AttentionBackend
from steadytorch.transforms.base import Applicable
from steadytorch.workload.workload import Workload


def variant(backend: str) -> AttentionBackend:
    return AttentionBackend(AttentionBackend.Parameters(backend))


def enabled(*args) -> set[str]:
    return {
        name for name, value in ambient().items() if name.startswith("sdp.") and value == "True"
    }


@pytest.mark.parametrize(
    ("backend", "setting"),
    [
        ("flash", "sdp.flash"),
        ("efficient", "sdp.mem_efficient"),
        ("cudnn", "sdp.cudnn"),
        ("math", "sdp.math"),
    ],
)
def test_only_the_backend_is_enabled_during_a_call(backend, setting):
    with variant(backend).applied(Workload(enabled, ())) as changed:
        assert changed.model() == {setting}


def test_a_backend_that_the_caller_had_disabled_stays_disabled_after():
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with variant("flash").applied(Workload(enabled, ())) as changed:
            assert changed.model() == {"sdp.flash"}
            assert "sdp.flash" not in enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_what_was_found_is_put_back_after_a_call_that_raises():
    def fails():
        raise ZeroDivisionError

    before = enabled()
    with variant("math").applied(Workload(fails, ())) as changed:
        with pytest.raises(ZeroDivisionError):
            changed.model()
        assert enabled() == before


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_a_model_with_attention_on_a_gpu_will_do(gpu, on_gpu, backend):
    made = on_gpu(nn.MultiheadAttention(4, 1))
    assert variant(backend).applies_to(made, gpu) == Applicable()


def test_a_model_without_attention_is_refused(gpu, on_gpu):
    answer = variant("flash").applies_to(on_gpu(nn.Linear(2, 2)), gpu)
    assert answer.reason == "the model does not use scaled dot product attention"


def test_an_old_gpu_is_refused(on_gpu):
    old = DeviceFacts(device="cuda", compute_capability="7.5", cudnn="9.19.0")
    made = on_gpu(nn.MultiheadAttention(4, 1))
    assert "compute capability 8.0" in variant("flash").applies_to(made, old).reason
    assert variant("efficient").applies_to(made, old) == Applicable()


@pytest.mark.parametrize(
    ("backend", "half_only"), [("flash", True), ("cudnn", True), ("efficient", False)]
)
def test_16_bit_backends_say_so(backend, half_only):
    assert variant(backend).takes_half_only is half_only
