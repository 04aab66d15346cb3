"""Every promise of a transform to a training step, for every variant that applies on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from steadytorch.device.facts import DeviceFacts
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import all_variants, create, order

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
contract: Any = sys.modules["steadytorch_transforms_contract"]

CPU = DeviceFacts(device="cpu", cores_physical=2, cores_logical=4)
COMPILED = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
STACK = order(
    [
        TransformSpec("threads", (("count", 1),)),
        TransformSpec("channels_last"),
        COMPILED,
        TransformSpec("autocast", (("dtype", "bf16"),)),
    ]
)
# Gradients accumulate more rounding: twice the tolerance of outputs.
TOLERANCE = {precision: 2 * bound for precision, bound in contract.TOLERANCE.items()}


def _cases() -> list[Any]:
    cases = []
    for name, make in contract.TRAINING.items():
        for transform in contract.applicable(all_variants(CPU), make(), CPU):
            if transform.name != "compile":
                specs = (transform.spec,)
                again = transform.name == "compile_loss" and name != "conv"  # the same loss
                marks = contract.SLOW if again else ()
                cases.append(
                    pytest.param((name, specs), id=f"{name}-{transform.spec}", marks=marks)
                )
    for label, specs in {"stack": STACK, "compiled": (COMPILED,)}.items():
        cases.append(pytest.param(("conv", specs), id=f"conv-{label}", marks=contract.SLOW))
    return cases


@pytest.fixture(scope="module")
def evidence(request: pytest.FixtureRequest) -> Any:
    name, specs = request.param
    make = contract.TRAINING[name]
    return contract.exercise_training([create(spec) for spec in specs], make(), make())


every_case = pytest.mark.parametrize("evidence", _cases(), indirect=True)


def test_what_is_known_to_train_is_among_the_cases():
    names = {spec.name for case in _cases() for spec in case.values[0][1]}
    assert names >= {"channels_last", "autocast", "compile", "threads"}
    assert not names & {"inference_mode", "cast_weights", "fold_batch_norm"}


@every_case
def test_losses_gradients_weights_buffers_and_momenta_are_those_of_untouched_steps(evidence):
    contract.assert_trained_alike(evidence, TOLERANCE[evidence.precision])


@every_case
def test_steps_move_the_models_own_weights_and_statistics(evidence):
    fresh = contract.TRAINING["conv" if "stem.weight" in evidence.found else "attention"]()
    for name, before in fresh.model.state_dict().items():
        if "unused" not in name and "embedding" not in name:
            assert not torch.equal(evidence.found[name], before), name


@every_case
def test_the_layout_of_weights_and_the_inputs_stay(evidence):
    assert evidence.strides_kept
    assert evidence.inputs_kept


@every_case
def test_no_process_setting_is_changed_between_steps_or_after(evidence):
    assert evidence.ambient_between == evidence.ambient_before
    assert evidence.ambient_after == evidence.ambient_before
