"""Training on a GPU: transforms keep their promises, candidates are verified, plans are served."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.bench.bench_worker import save_payload
from steadytorch.device.facts import DeviceFacts
from steadytorch.results.candidate import TransformSpec
from steadytorch.transforms import all_variants, ambient, create, order, set_ambient
from steadytorch.transforms.base import NotApplicable
from steadytorch.transforms.precision import precision_of
from steadytorch.tune.session import tune
from steadytorch.tune.tuning_worker import Character, Explained, TuningHandler
from steadytorch.verification.verdict import Reference, Verification, decide
from steadytorch.workload.supervised import CrossEntropy
from steadytorch.workload.workload import Workload

contract: Any = sys.modules["steadytorch_transforms_contract"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("ieee"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

LAYOUT, ENGINES = TransformSpec("channels_last"), TransformSpec("cudnn_engines")
HALF = TransformSpec("autocast", (("dtype", "bf16"),))
COMPILED = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
STACKS = {
    "mixed": order([LAYOUT, HALF]),
    "compiled": order([LAYOUT, COMPILED, HALF]),
    "engines": order([LAYOUT, ENGINES, HALF]),
    "compiled engines": order([LAYOUT, ENGINES, COMPILED, HALF]),
}
STEPS = 20
IGNORED = pytest.mark.filterwarnings("ignore")  # the compiler's own warnings


# -- transforms ---------------------------------------------------------------------------------


def _cases() -> list[Any]:
    cases = []
    for name in contract.TRAINING:
        for transform in all_variants(contract.LISTED_FOR):
            if transform.name not in ("compile", "attention_backend"):
                marks = [IGNORED] if transform.name == "compile_loss" else []
                case = (name, (transform.spec,))
                cases.append(pytest.param(case, id=f"{name}-{transform.spec}", marks=marks))
    for label, stack in {**STACKS, "compiled alone": (COMPILED,)}.items():
        cases.append(pytest.param(("conv", stack), id=f"conv-{label}", marks=contract.SLOW))
    return cases


@pytest.fixture(scope="module")
def evidence(request: pytest.FixtureRequest, ieee: None, facts: DeviceFacts) -> Any:
    name, specs = request.param
    make = contract.TRAINING[name]
    transforms = [create(one) for one in specs]
    for transform in transforms:
        answer = transform.applies_to(make("cuda"), facts)
        if isinstance(answer, NotApplicable):
            pytest.skip(f"{transform.spec}: {answer.reason}")
    return contract.exercise_training(transforms, make("cuda"), make("cuda"))


every_case = pytest.mark.parametrize("evidence", _cases(), indirect=True)


@every_case
def test_losses_gradients_weights_buffers_and_momenta_are_those_of_untouched_steps(evidence):
    contract.assert_trained_alike(evidence, 2 * contract.TOLERANCE[evidence.precision])


@every_case
def test_layout_inputs_and_process_settings_stay(evidence):
    assert evidence.strides_kept
    assert evidence.inputs_kept
    assert evidence.ambient_between == evidence.ambient_before
    assert evidence.ambient_after == evidence.ambient_before


# -- verification -------------------------------------------------------------------------------


def kinked(width: int = 32, blocks: int = 4) -> Workload:
    """Convolutions with batch norm and ReLU; nothing that a worker could not import."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(blocks):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    loss = CrossEntropy(torch.randint(10, (16,)))
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    inputs = torch.randn(16, 3, 32, 32)
    return Workload.training(nn.Sequential(*layers).train(), inputs, loss, optimizer)


@pytest.fixture(scope="module")
def referred(tmp_path_factory: pytest.TempPathFactory, ieee: None) -> Any:
    """The folder of a workload with its reference, and the reference."""
    folder = tmp_path_factory.mktemp("training")
    save_payload(kinked(), folder)
    handler = TuningHandler(folder)
    handler.load("cuda", ambient())
    found = msgspec.convert(handler.reference(0), Reference)
    handler.close()
    set_ambient(contract.IEEE)
    return folder, found


@pytest.mark.parametrize(
    "candidate",
    [
        (),
        (LAYOUT,),
        (HALF,),
        (TransformSpec("tf32"),),
        *[pytest.param(stack, marks=contract.SLOW, id=label) for label, stack in STACKS.items()],
        pytest.param((COMPILED,), marks=contract.SLOW, id="compiled alone"),
    ],
    ids=str,
)
def test_candidates_that_train_are_accepted(referred, facts, candidate):
    folder, reference = referred
    handler = TuningHandler(folder)
    handler.load("cuda", ambient())
    for spec in candidate:
        answer = create(spec).applies_to(handler.workload, facts)
        if isinstance(answer, NotApplicable):
            pytest.skip(f"{spec}: {answer.reason}")
    handler.set_up(msgspec.to_builtins(candidate))
    found = msgspec.convert(handler.verify(), Verification)
    assert decide(found, reference, precision_of(candidate), None) is None
    assert all(time > 0 for time in handler.block("period", 5))
    handler.close()


def test_a_reference_is_of_float64_and_says_what_rounding_explains(referred):
    _, reference = referred
    assert reference.precision == "float64"
    assert reference.repeatable
    errors = [reference.explained[c]["gradients"].relative_l2 for c in ("same", "fp16", "bf16")]
    assert 0 < errors[0] < errors[1] < errors[2]


def test_half_precision_is_not_the_same(referred):
    folder, reference = referred
    handler = TuningHandler(folder)
    handler.load("cuda", ambient())
    handler.set_up(msgspec.to_builtins((HALF,)))
    found = msgspec.convert(handler.verify(), Verification)
    assert "relative error" in str(decide(found, reference, "same", None))
    handler.close()


def test_what_bounds_a_step_is_known(referred):
    handler = TuningHandler(referred[0])
    handler.load("cuda", ambient())
    explained = msgspec.convert(handler.explained(), Explained)
    found = msgspec.convert(handler.characterise(explained.product_flops), Character)
    assert found.regime in ("launch-bound", "memory-bound", "compute-bound")
    assert found.matrix_share is not None
    handler.close()


# -- plans --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_small_training_workload_is_tuned_and_its_plan_trains(tmp_path):
    workload = kinked()
    plan = tune(workload, precision="bf16", budget="100s", store=tmp_path, device="cuda")
    assert plan.trains is not None
    timed = [trial for trial in plan.evidence.trials if trial.median_ns is not None]
    assert any(trial.transforms for trial in timed)
    model = workload.to("cuda").model
    own, fast = copy.deepcopy(model), plan.apply(model)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,)))
        for _ in range(STEPS)
    ]
    losses = [_trained(module, batches) for module in (own, fast)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0.05)
    served = fast.report().hits
    assert served == (STEPS if plan.candidate else 0)


def _trained(model: nn.Module, batches: list[Any]) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.cuda()), targets.cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()
