from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytorch.training.passes import (
    BLEND,
    BUFFERS,
    GRADIENTS,
    LOSS,
    OUTPUTS,
    SMALL,
    begin,
    errors_of,
    loss_alone,
    optimizer_fault,
    passes,
    size_fault,
)
from steadytorch.workload.start import Start, optimizer_of, parameters_of, with_optimizer
from steadytorch.workload.workload import Workload

from .trained import momentum, workload


def taken(made):
    return passes(made, made.model, (made.inputs, {}))


def right(found):
    return {
        OUTPUTS: found.outputs,
        LOSS: found.loss,
        GRADIENTS: found.gradients,
        BUFFERS: found.moved,
    }


@pytest.fixture
def made():
    return workload()[0]


def test_passes_give_what_a_hand_written_step_gives(made):
    found = taken(made)
    other, _ = workload()
    loss = other.training_step.loss(other.model(*other.inputs))
    loss.backward()
    assert torch.equal(found.loss, loss)
    for name, p in other.model.named_parameters():
        assert (p.grad is None) == (found.gradients[name] is None) == ("unused" in name)
        assert p.grad is None or torch.equal(p.grad, found.gradients[name])
    assert torch.equal(found.moved["norm.running_mean"], other.model.norm.running_mean)
    assert torch.equal(found.moved["norm.running_var"], other.model.norm.running_var - 1)
    assert found.counted["norm.num_batches_tracked"] == 1


def test_gradients_of_before_are_not_added_to(made):
    first = taken(made).gradients["head.weight"].clone()
    made.training_step.loss(made.model(*made.inputs)).backward()
    assert torch.allclose(taken(made).gradients["head.weight"], first, rtol=1e-3)


def test_passes_that_are_alike_have_no_error(made):
    found = taken(made)
    errors = errors_of(found, right(found))
    assert list(errors) == [OUTPUTS, LOSS, GRADIENTS, BUFFERS]
    assert all((error.relative_l2, error.relative_max) == (0, 0) for error in errors.values())


@given(scale=st.floats(1e-6, 1e3), name=st.sampled_from(["conv.weight", "head.weight"]))
def test_the_error_of_gradients_is_that_of_all_and_of_the_worst(scale, name):
    made, _ = workload()
    found = taken(made)
    expected = right(found)
    gradient = found.gradients[name]
    expected[GRADIENTS] = {**found.gradients, name: gradient * (1 + scale)}
    error = errors_of(found, expected)[GRADIENTS]
    norms = {n: float(g.double().norm()) for n, g in expected[GRADIENTS].items() if g is not None}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    off = float((gradient.double() - expected[GRADIENTS][name].double()).norm())
    assert error.relative_l2 == pytest.approx(off / whole)
    assert error.relative_max == pytest.approx(off / max(norms[name], SMALL * whole))


def test_a_gradient_that_is_nothing_but_rounding_is_judged_by_the_others(made):
    """A bias before a batch norm: its gradient is zero apart from rounding."""
    found = taken(made)
    expected = right(found)
    noise = found.gradients["conv.bias"]
    others = float(
        torch.cat([g.flatten() for g in found.gradients.values() if g is not None]).norm()
    )
    assert float(noise.norm()) < 1e-4 * others
    expected[GRADIENTS] = {**found.gradients, "conv.bias": torch.zeros_like(noise)}
    assert errors_of(found, expected)[GRADIENTS].relative_max < 1e-2
    assert size_fault(found, expected) is None


@pytest.mark.parametrize("factor", [0.0, 0.4, 2.5, -3.0])
def test_a_gradient_of_another_size_is_a_fault(made, factor):
    found = taken(made)
    sized = found._replace(
        gradients={**found.gradients, "head.bias": factor * found.gradients["head.bias"]}
    )
    assert size_fault(found, right(found)) is None
    assert size_fault(sized, right(found)) == (
        f"the gradient of head.bias is {abs(factor):.2g} times as large as it should be"
    )


def test_a_buffer_that_moves_too_far_is_a_fault(made):
    found = taken(made)
    moved = found._replace(moved={name: 3 * tensor for name, tensor in found.moved.items()})
    assert size_fault(moved, right(found)) == (
        "buffer norm.running_mean moves 3 times as far as it should"
    )


def test_every_other_set_has_other_weights_and_all_begin_at_the_start():
    made, start = workload()
    own = {name: p.detach().clone() for name, p in parameters_of(made).items()}
    for number in range(4):
        begin(made, start, number)
        for name, p in parameters_of(made).items():
            blended = (1 - BLEND) * own[name] + BLEND * own[name].flip(0)
            assert torch.equal(p, blended if number % 2 else own[name])


OPTIMIZERS = {
    "sgd": momentum,
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1),
    "frozen": lambda p: torch.optim.SGD([t for t in p if t.dim() > 1], lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_own_step_of_an_optimizer_has_no_fault_and_is_undone(optimizer):
    made, start = workload(optimizer=OPTIMIZERS[optimizer])
    before = {name: p.detach().clone() for name, p in parameters_of(made).items()}
    assert optimizer_fault(made, made.step_function(), start) is None
    assert all(torch.equal(before[name], p) for name, p in parameters_of(made).items())


def test_a_step_with_other_state_is_a_fault():
    made, start = workload()

    def step():
        made.step_function()()
        for state in optimizer_of(made).state.values():
            state["momentum_buffer"].zero_()
        made.step_function()()

    assert "differently than its gradient requires" in optimizer_fault(made, step, start)


def adamw(parameters, factor=1.0, **given):
    given = {"lr": factor * 1e-4, "weight_decay": 0.1} | given
    return torch.optim.AdamW(parameters, **given)


UPDATES = {
    "fused": (lambda p: adamw(p, fused=True), None),
    "foreach": (lambda p: adamw(p, foreach=True), None),
    "at twice the rate": (lambda p: adamw(p, 2.0), "differently"),
    "at 99 % of the rate": (lambda p: adamw(p, 0.99), "differently"),
    "without decay": (lambda p: adamw(p, weight_decay=0.0), "differently"),
    "nothing": (lambda p: adamw(p, 0.0), "leaves"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", UPDATES)
def test_updates_that_are_small_beside_the_weights_are_compared_beyond_rounding(kind, dtype):
    make, fault = UPDATES[kind]
    if dtype == torch.bfloat16 and kind in ("at 99 % of the rate", "without decay"):
        pytest.skip("less than bf16 weights resolve")
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=dtype)
    nn.init.normal_(model.weight, std=0.01 if dtype == torch.bfloat16 else 1.0)
    targets = torch.randint(64, (16,))
    made = with_optimizer(
        Workload.training(
            model, torch.randn(16, 64, dtype=dtype), nn.CrossEntropyLoss(), adamw, targets=targets
        )
    )
    start = Start(made)

    def step():
        taken(made)
        make(model.parameters()).step()

    found = optimizer_fault(made, step, start)
    assert found is None if fault is None else fault in found


class Kept(nn.Module):
    """Keeps its output, which the loss writes to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def test_outputs_are_those_before_the_loss_has_them():
    given = Workload.training(
        Kept(), torch.randn(2, 4), lambda out: out.mul_(2).sum(), torch.optim.SGD
    )
    made = with_optimizer(given)
    expected = made.model(*made.inputs).detach()
    assert torch.equal(taken(made).outputs[0], expected)


def test_passes_know_whether_they_are_finite(made):
    found = taken(made)
    assert found.is_finite()
    assert not found._replace(loss=torch.tensor(float("inf"))).is_finite()
    bad = {**found.gradients, "head.bias": torch.full((4,), float("nan"))}
    assert not found._replace(gradients=bad).is_finite()


def _loss_of_bf16_output(take, weights):
    model = nn.Linear(4, 3).to(weights)
    x, y = torch.randn(5, 4, dtype=weights), torch.randint(3, (5,))
    made = with_optimizer(
        Workload.training(model, x, nn.functional.cross_entropy, torch.optim.SGD, targets=y)
    )

    def lowered(batch):
        return model(batch).bfloat16()

    return take(made, lowered, (made.inputs, {}))


def test_the_loss_of_a_pass_takes_the_output_as_it_is():
    assert _loss_of_bf16_output(passes, torch.float32).loss.dtype == torch.bfloat16


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_loss_alone_is_not_rounded_more_than_the_models_own(weights):
    assert _loss_of_bf16_output(loss_alone, weights).dtype == weights
