from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steadytorch import transforms
from steadytorch.results.candidate import TransformSpec
from steadytorch.training.reference import make_reference
from steadytorch.training.verify import verify_training
from steadytorch.transforms.autocast import AutocastModel
from steadytorch.transforms.base import applied_in_order
from steadytorch.verification.verdict import decide
from steadytorch.workload.start import Start, optimizer_of, with_optimizer
from steadytorch.workload.workload import Workload

from .trained import Candidate, Loss, Net, through, workload

pytestmark = pytest.mark.usefixtures("one_thread")
REFERENCES: dict = {}


def referred(model=Net, **given):
    """A workload and its reference, made once per model."""
    made, start = workload(model, **given)
    if model not in REFERENCES or given:
        REFERENCES[model] = make_reference(made, 0, start)
    data, reference = REFERENCES[model]
    return SimpleNamespace(workload=made, start=start, data=data, reference=reference)


def verdict(case, model, precision="same", step=None):
    made = case.workload
    step = step or made.with_model(model).step_function()
    found = verify_training(model, step, made, case.data, case.start)
    return decide(found, case.reference, precision, None)


FAULTS = {
    "detached": "gives no gradient to conv.weight",
    "head_only": "gives no gradient to conv.weight",
    "copied": "gives no gradient to conv.weight",
    "stale": "the gradient of norm.weight is",
    "all_get_one": "gives a gradient to unused.weight",
    "nan_gradient": "the gradient of conv.weight holds NaN",
    "large_gradient": "the gradient of conv.weight is 3 times as large",
    "no_gradient_value": "the gradient of conv.weight is 0 times as large",
    "coarse_gradient": "gradients: relative error",
    "other_gradient": "gradients: relative error",
    "wrong_loss": "outputs: relative error",
    "statistics_twice": "buffer norm.num_batches_tracked differs",
    "no_statistics": "buffer norm.running_mean moves 0 times as far",
    "writes_weights": "writes to unused.weight, which only the optimizer may update",
    "writes_inputs": "writes to its inputs",
    "nests": "nests its outputs in other containers",
    "one_buffer_for_outputs": "two calls return the same memory, which is not the model's",
    "one_buffer_for_gradients": "a later step overwrites the gradients of an earlier one",
}


def test_the_untouched_step_passes_its_own_verification():
    case = referred()
    assert verdict(case, Candidate("honest", case.workload.model)) is None


@pytest.mark.parametrize("kind", FAULTS)
def test_a_step_that_is_wrong_is_rejected_with_what_is_wrong(kind):
    case = referred()
    reason = verdict(case, Candidate(kind, case.workload.model))
    assert reason is not None
    assert reason.startswith(FAULTS[kind])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda output, loss: loss(output) * 1.05, "loss: relative error"),
        (lambda output, loss: loss(output.detach()) + 0 * output.sum(), "is 0 times as large"),
        (lambda output, loss: loss(output) + 3 * (output.sum() - output.sum().detach()), "grad"),
    ],
)
def test_a_compiled_loss_that_is_wrong_is_rejected(wrong, reason):
    case = referred()
    step = dataclasses.replace(
        case.workload.training_step,
        compiled_loss=lambda loss: lambda output, dtype=None: wrong(output, loss),
    )
    case.workload = dataclasses.replace(case.workload, training_step=step)
    found = verdict(case, case.workload.model)
    assert found is not None
    assert reason in found


def test_outputs_may_be_padded_for_a_compiled_loss_alone():
    case = referred()
    own = case.workload.model

    def padded(x):
        return F.pad(own(x), (0, 4))[:, :4]

    assert verdict(case, padded).startswith("an output is a tensor with strides (8, 1)")
    compiled = lambda loss: lambda output, dtype=None: loss(output)  # noqa: E731
    step = dataclasses.replace(case.workload.training_step, compiled_loss=compiled)
    case.workload = dataclasses.replace(case.workload, training_step=step)
    assert verdict(case, padded) is None


@pytest.mark.parametrize(("factor", "reason"), [(1.0, None), (1.5, "loss: relative error")])
def test_a_compiled_loss_is_verified_on_the_16_bit_outputs_that_it_gets(factor, reason):
    case, seen = referred(), []

    def compiled(loss):
        def converting(output, dtype=None):
            seen.append((output.dtype, dtype))
            return loss(output.to(dtype)) * factor

        return converting

    step = dataclasses.replace(case.workload.training_step, compiled_loss=compiled, autocast=True)
    case.workload = dataclasses.replace(case.workload, training_step=step)
    model = AutocastModel(case.workload.model, "cpu", torch.bfloat16, torch.float32)
    found = verdict(case, model, "bf16")
    assert found is None if reason is None else reason in found
    assert set(seen) == {(torch.bfloat16, torch.float32)}


LOWER = sorted(FAULTS.keys() - {"coarse_gradient", "wrong_loss"})


@pytest.mark.parametrize("kind", LOWER)
def test_what_is_wrong_is_no_less_so_in_a_lower_class(kind):
    case = referred()
    assert verdict(case, Candidate(kind, case.workload.model), "bf16") is not None


def relu():
    return Net(F.relu)


@pytest.mark.parametrize("model", [Net, relu], ids=["smooth", "kinks"])
@pytest.mark.parametrize(
    ("names", "precision"),
    [
        (["channels_last"], "same"),
        (["autocast"], "bf16"),
        (["channels_last", "autocast"], "bf16"),
    ],
)
def test_real_transforms_pass_in_their_class(model, names, precision):
    case = referred(model)
    specs = {"channels_last": (), "autocast": (("dtype", "bf16"),)}
    parts = [transforms.create(TransformSpec(name, specs[name])) for name in names]
    with applied_in_order(parts, case.workload) as applied:
        assert verdict(case, applied.model, precision) is None


@pytest.mark.parametrize("model", [Net, relu], ids=["smooth", "kinks"])
def test_half_precision_is_not_the_same(model):
    case = referred(model)
    half = transforms.create(TransformSpec("autocast", (("dtype", "bf16"),)))
    with applied_in_order([half], case.workload) as applied:
        assert "relative error" in verdict(case, applied.model)


def test_a_step_whose_update_is_not_taken_is_rejected():
    case = referred()
    step = case.workload.step_function()
    weights = dict(case.workload.model.named_parameters())

    def without_update():
        before = {name: p.detach().clone() for name, p in weights.items()}
        step()
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(before[name])

    assert verdict(case, case.workload.model, step=without_update) == (
        "the step leaves conv.weight unchanged"
    )


def test_a_step_whose_update_is_not_its_gradients_is_rejected():
    case = referred()
    step = case.workload.step_function()

    def at_another_rate():
        optimizer_of(case.workload).param_groups[0]["lr"] = 0.2
        step()

    assert verdict(case, case.workload.model, step=at_another_rate) == (
        "the step updates conv.weight differently than its gradient requires"
    )


def test_tiny_gradients_of_an_adaptive_optimizer_are_no_obstacle():
    """An optimizer whose first update has full length, with signs that rounding decides."""
    case = referred(relu, optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    layout = transforms.create(TransformSpec("channels_last"))
    with applied_in_order([layout], case.workload) as applied:
        assert verdict(case, applied.model) is None


def test_the_workload_is_where_it_was_in_the_end():
    case = referred()
    before = copy.deepcopy(case.workload.model.state_dict())
    verdict(case, Candidate("honest", case.workload.model))
    after = case.workload.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not optimizer_of(case.workload).state


def test_steps_that_draw_the_same_random_numbers_are_compared_number_by_number():
    case = referred(lambda: Drops())
    assert verdict(case, case.workload.model) is None


def test_steps_that_draw_other_random_numbers_are_compared_as_distributions():
    case = referred(lambda: Drops())
    model = case.workload.model

    def dropped(rate):
        def call(x):
            output = Net.forward(model, x)
            return output * (torch.rand(output.shape) >= rate) / 0.5

        return call

    assert verdict(case, dropped(0.5)) is None
    assert verdict(case, dropped(0.3)).startswith("random numbers: ")


class Drops(Net):
    """With dropout, in training."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


def test_gradients_that_are_not_finite_cannot_be_verified():
    case = referred(lambda: Explodes())
    assert verdict(case, case.workload.model).startswith("cannot be verified: loss or gradients")


class Explodes(Net):
    """A square root at zero, where the slope is infinite."""

    def forward(self, x):
        return super().forward(x) + (self.unused.weight.sum() * 0).sqrt()


class Says(Net):
    """Returns a number with its output."""

    def forward(self, x):
        output = super().forward(x)
        return [output, output.norm().item()]


def test_a_number_beside_the_output_is_compared_too():
    case = referred(Says)
    assert verdict(case, case.workload.model) is None

    def off(x):
        output, said = case.workload.model(x)
        return [output, said * 1.01]

    assert verdict(case, off).startswith("outputs: relative error 1.0e-02")

    def another(x):
        output, said = case.workload.model(x)
        return [output, complex(said)]

    assert verdict(case, another) == "an output is a complex, expected a float"


class Rows(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(8, 4, sparse=True)

    def forward(self, ids):
        return self.rows(ids).mean(1)


def test_sparse_gradients_are_compared_by_value():
    loss = Loss(torch.tensor([0, 1]))
    made = Workload.training(Rows(), torch.tensor([[1, 2], [3, 1]]), loss, torch.optim.SGD)
    made = with_optimizer(made)
    start = Start(made)
    data, reference = make_reference(made, 0, start)
    case = SimpleNamespace(workload=made, start=start, data=data, reference=reference)
    assert verdict(case, made.model) is None
    off = verdict(case, lambda ids: through(made.model(ids), lambda g: 1.2 * g))
    assert off.startswith("gradients: relative error 2.0e-01")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [Net, relu], ids=["smooth", "kinks"])
def test_a_compiled_step_passes(model):
    case = referred(model)
    compiled = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
    with applied_in_order([transforms.create(compiled)], case.workload) as applied:
        assert verdict(case, applied.model) is None
