from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UnsupportedError
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import create
from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.transforms.traits import (
    capability_below,
    convolutions,
    decide,
    half_unsupported,
    hooked,
    may_attend,
    may_convolve,
    no_cuda,
    not_float32,
    off_device,
)
from steadytorch.workload.workload import Workload


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def configured(implementation):
    model = nn.Identity()
    model.config = SimpleNamespace(_attn_implementation=implementation)
    return model


def test_the_first_objection_that_holds_is_the_reason():
    answer = decide((False, "no"), (True, "first"), (True, "second"))
    assert answer == NotApplicable("first")


def test_without_objections_it_applies():
    assert decide((False, "no")) == Applicable()


@pytest.mark.parametrize(
    ("found", "below"), [("7.5", True), ("8.0", False), ("9.0", False), ("12.0", False)]
)
def test_capabilities_are_compared_as_numbers(found, below):
    facts = DeviceFacts(device="cuda", compute_capability=found)
    assert capability_below(facts, (8, 0), "it")[0] is below


def test_an_unknown_capability_is_no_objection():
    assert not capability_below(DeviceFacts(device="cuda"), (8, 0), "it")[0]


def test_the_device_it_is_to_run_on_decides_not_where_the_workload_is_now(gpu, cpu):
    assert no_cuda(cpu) == (True, "no CUDA device")
    assert not no_cuda(gpu)[0]


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "unsupported"),
    [
        ("cpu", None, "bf16", False),
        ("cpu", None, "fp16", True),
        ("cuda", "7.5", "bf16", True),
        ("cuda", "7.5", "fp16", False),
        ("cuda", "8.0", "bf16", False),
    ],
)
def test_emulated_16_bit_arithmetic_is_refused(device, capability, dtype, unsupported):
    facts = DeviceFacts(device=device, compute_capability=capability)
    assert half_unsupported(facts, dtype)[0] is unsupported


def test_the_type_found_is_named():
    workload = Workload(nn.Linear(2, 2).double(), torch.ones(1, 2))
    assert not_float32(workload) == (True, "needs float32, the workload computes in float64")


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("options", [{}, {"with_kwargs": True}])
def test_a_hook_anywhere_below_the_model_is_seen_and_seen_to_go(register, options):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    handle = getattr(model[0][0], register)(lambda *given: None, **options)
    assert hooked(Workload(model))[0]
    handle.remove()
    assert not hooked(Workload(model))[0]


def test_the_hooks_that_count_are_those_of_the_untouched_model():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *given: None)
    assert hooked(Workload(model).with_model(abs))[0]
    assert not hooked(Workload(abs))[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # these norms are deprecated, and in use
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hooks_that_only_compute_weights_do_not_count(norm):
    model = norm(nn.Linear(2, 2))
    assert not hooked(Workload(model))[0]
    model.register_forward_pre_hook(lambda *given: None)
    assert hooked(Workload(model))[0]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((torch.ones(2), 3, None), False),
        ((torch.ones(2), torch.ones((), device="meta")), True),
        (([torch.ones(2), {"a": torch.ones(1, device="meta")}],), True),
        ((), False),
    ],
    ids=["one device", "a scalar", "nested", "none"],
)
def test_every_input_is_to_be_on_the_workloads_device(inputs, expected):
    assert off_device(Workload(nn.Linear(2, 2), inputs))[0] is expected
    assert off_device(Workload(abs, inputs))[0] is expected
    named = {f"x{i}": value for i, value in enumerate(inputs)}
    assert off_device(Workload(nn.Linear(2, 2), named))[0] is expected


def test_transposed_convolutions_count():
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.Linear(1, 1))
    assert convolutions(model) == [model[0], model[1]]


@pytest.mark.parametrize(
    ("model", "expected"),
    [(nn.Conv2d(1, 1, 1), True), (nn.Linear(1, 1), False), (abs, True)],
    ids=["convolution", "linear", "callable"],
)
def test_convolutions_are_looked_for(model, expected):
    assert may_convolve(Workload(model)) is expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(Attends()), True),
        (nn.MultiheadAttention(4, 1), True),
        (nn.Linear(1, 1), False),
        (configured("sdpa"), True),
        (configured("eager"), False),
        (abs, True),
    ],
    ids=["source", "layer", "linear", "sdpa", "eager", "callable"],
)
def test_attention_is_looked_for(model, expected):
    assert may_attend(Workload(model)) is expected


@pytest.mark.parametrize("name", ["channels_last", "cast_weights", "autocast", "inference_mode"])
def test_hooks_are_given_what_the_untouched_model_gives_them(name, cpu):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    model[0].register_forward_hook(lambda module, given, result: result.view(-1))
    workload = Workload(model, torch.ones(1, 3, 8, 8))
    transform = create(TransformSpec(name))
    assert "the model has hooks" in transform.applies_to(workload, cpu).reason
    with pytest.raises(UnsupportedError, match="the model has hooks"), transform.applied(workload):
        pass
