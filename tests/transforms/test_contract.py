"""Every promise of a transform, for every variant that applies on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from steadytorch.device.facts import DeviceFacts
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import all_variants, conflict, create, order
from steadytorch.transforms.base import Applicable, NotApplicable
from steadytorch.transforms.openvino import OpenVino

contract: Any = sys.modules["steadytorch_transforms_contract"]

CPU = DeviceFacts(device="cpu", cores_physical=2, cores_logical=4)
GPU = DeviceFacts(device="cuda", compute_capability="9.0", cudnn="9.19.0", triton="3.6.0")
VARIANTS = [*all_variants(CPU), *all_variants(GPU)]

COMPILED = (
    TransformSpec("compile", (("mode", "default"), ("freezing", True))),
    TransformSpec("compile", (("mode", "default"), ("freezing", False))),
)
STACK = order(
    [
        TransformSpec("inference_mode"),
        TransformSpec("threads", (("count", 1),)),
        TransformSpec("channels_last"),
        COMPILED[0],
        TransformSpec("cast_weights", (("dtype", "bf16"),)),
        TransformSpec("fold_batch_norm"),
    ]
)


def _cases() -> list[Any]:
    cases = []
    # Converting takes seconds.
    bf16 = OpenVino(OpenVino.Parameters("bf16"))
    quick = [("attention", OpenVino().spec), ("conv", bf16.spec)]
    for name, make in contract.WORKLOADS.items():
        for transform in contract.applicable(all_variants(CPU), make(), CPU):
            if transform.name != "compile":
                specs = (transform.spec,)
                marks = contract.SLOW if transform.engine and (name, *specs) not in quick else ()
                case = pytest.param((name, specs), id=f"{name}-{transform.spec}", marks=marks)
                cases.append(case)
    # It targets CUDA, but is correct everywhere.
    patches = (TransformSpec("linear_patches"),)
    cases.append(pytest.param(("patches", patches), id="patches-linear_patches"))
    stack = order([*STACK, *patches])
    cases.append(pytest.param(("patches", stack), id="patches-stack", marks=contract.SLOW))
    slow = {"stack": STACK, **{str(spec): (spec,) for spec in COMPILED}}
    for label, specs in slow.items():
        cases.append(pytest.param(("conv", specs), id=f"conv-{label}", marks=contract.SLOW))
    return cases


@pytest.fixture(scope="module")
def evidence(request: pytest.FixtureRequest) -> Any:
    name, specs = request.param
    return contract.exercise([create(spec) for spec in specs], contract.WORKLOADS[name]())


every_case = pytest.mark.parametrize("evidence", _cases(), indirect=True)


@every_case
def test_outputs_agree_with_the_untouched_model(evidence):
    contract.assert_close(evidence.first, evidence.expected, evidence.precision)


@every_case
def test_original_inputs_are_accepted(evidence):
    contract.assert_close(evidence.original_inputs, evidence.expected, evidence.precision)


@every_case
def test_other_values_of_the_same_signature_give_their_own_outputs(evidence):
    contract.assert_close(evidence.other, evidence.expected_other, evidence.precision)


@every_case
def test_outputs_are_intact_after_the_next_calls(evidence):
    assert all(map(_equal, evidence.first, evidence.first_at_once))


@every_case
def test_outputs_are_ordinary_tensors(evidence):
    assert not any(tensor.is_inference() for tensor in evidence.first + evidence.other)


@every_case
def test_the_original_model_is_untouched(evidence):
    assert evidence.state_kept
    assert evidence.strides_kept


@every_case
def test_inputs_are_not_written_to(evidence):
    assert evidence.inputs_kept


@every_case
def test_no_process_setting_is_changed_between_calls_or_after(evidence):
    assert evidence.ambient_between == evidence.ambient_before
    assert evidence.ambient_after == evidence.ambient_before


@pytest.mark.parametrize("transform", VARIANTS, ids=lambda t: str(t.spec))
def test_every_variant_survives_as_data(transform):
    again = create(transform.spec)
    assert type(again) is type(transform)
    assert again.parameters == transform.parameters
    assert again.spec == transform.spec


@pytest.mark.parametrize("transform", VARIANTS, ids=lambda t: str(t.spec))
@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_variant_applies_or_says_why_not(transform, facts, conv_workload):
    answer = transform.applies_to(conv_workload, facts)
    assert isinstance(answer, Applicable) or len(answer.reason) > len("no")


@pytest.mark.parametrize("transform", VARIANTS, ids=lambda t: str(t.spec))
def test_every_variant_answers_for_a_plain_callable(transform, conv_workload):
    function = conv_workload.with_model(conv_workload.model.forward)
    assert isinstance(transform.applies_to(function, CPU), (Applicable, NotApplicable))


@pytest.mark.parametrize("transform", VARIANTS, ids=lambda t: str(t.spec))
def test_every_variant_excludes_itself(transform):
    assert conflict((transform.spec, transform.spec)) == f"{transform.name} is listed twice"


def _equal(found: Any, expected: Any) -> bool:
    return bool((found == expected).all())
