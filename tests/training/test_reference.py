from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from steadytorch.training.passes import BUFFERS, GRADIENTS, LOSS, OUTPUTS
from steadytorch.training.reference import (
    INPUT_SETS,
    ROUNDING,
    growth_of,
    is_repeatable,
    make_reference,
)
from steadytorch.verification.verdict import OutputError
from steadytorch.workload.start import Start, parameters_of, with_optimizer
from steadytorch.workload.workload import Workload

from .trained import Loss, Net, workload


def reference(made=None, start=None, **given):
    if made is None:
        made, start = workload(**given)
    return make_reference(made, 0, start)


def kinked():
    return Net(F.relu)


def test_own_errors_are_those_of_float32_against_float64():
    data, found = reference()
    assert (found.precision, found.repeatable, found.fresh) == ("float64", True, True)
    assert 1e-9 < found.error.relative_l2 < 1e-5
    assert data["right"][0][OUTPUTS][0].dtype == torch.float64
    assert data["right"][0][GRADIENTS]["conv.weight"].dtype == torch.float32
    assert data["right"][0][GRADIENTS]["unused.weight"] is None


def test_errors_that_rounding_explains_grow_with_it():
    _, found = reference()
    for part in (OUTPUTS, LOSS, GRADIENTS, BUFFERS):
        errors = [found.explained[name][part].relative_l2 for name in ("same", "fp16", "bf16")]
        assert errors == sorted(errors)
        assert 1e-8 < errors[0] < 1e-4
        assert 1e-4 < errors[2] < 0.2
    assert found.explained["tf32"] == found.explained["fp16"]


def test_own_errors_are_among_those_that_rounding_explains():
    _, found = reference()
    most = max(error.relative_l2 for error in found.explained["same"].values())
    assert found.error.relative_l2 <= most


def test_rounding_moves_gradients_further_where_there_are_kinks():
    smooth, sharp = (reference(model=model)[1].explained["same"] for model in (Net, kinked))
    assert sharp[GRADIENTS].relative_l2 > 10 * smooth[GRADIENTS].relative_l2
    assert sharp[OUTPUTS].relative_l2 < 10 * smooth[OUTPUTS].relative_l2


@pytest.mark.parametrize(
    ("fine", "coarse", "expected"),
    [
        (1e-3, 8e-3, 1e-3 / 512),
        (1e-3, math.sqrt(8) * 1e-3, 1e-3 / math.sqrt(512)),
        (0.9, 1.3, 0.9 / math.sqrt(512)),
        (1e-3, 1.0, 1e-3 / 512),
        (0.0, 0.0, 0.0),
    ],
    ids=["smooth", "kinks", "saturated", "steep", "none"],
)
def test_errors_of_finer_noise_follow_from_those_of_coarser(fine, coarse, expected):
    errors = dict(zip(sorted(set(ROUNDING.values())), (fine, coarse), strict=True))
    assert fine * growth_of(errors, 2.0**-20) == pytest.approx(expected)


def _parts(error):
    return {part: OutputError(error, error) for part in (OUTPUTS, LOSS, GRADIENTS, BUFFERS)}


@pytest.mark.parametrize(
    ("noise", "explained", "precise", "repeats"),
    [
        (0.0, 0.0, None, True),
        (1e-6, 1e-6, 1e-12, True),
        (3e-6, 1e-6, None, False),
        (0.5, 0.7, 0.5, False),
    ],
    ids=["bit for bit", "within rounding", "beyond it", "random"],
)
def test_a_step_repeats_itself_within_rounding(noise, explained, precise, repeats):
    """Passes at the higher precision are repeated only if their noise decides."""

    def again():
        assert precise is not None
        return _parts(precise)

    assert is_repeatable(_parts(noise), _parts(explained), again) is repeats


def test_every_other_set_is_of_other_weights():
    data, _ = reference()
    assert len(data["sets"]) == INPUT_SETS
    made, start = workload()
    made.model(*data["sets"][0])
    start.restore()
    assert torch.equal(made.model(*data["sets"][0]), data["own"][0][0])
    start.restore()
    assert not torch.allclose(made.model(*data["sets"][1]), data["own"][1][0], rtol=1e-2)


def test_the_workload_and_the_process_are_as_they_were():
    made, start = workload()
    before = {name: t.clone() for name, t in made.model.state_dict().items()}
    random = torch.get_rng_state()
    make_reference(made, 0, start)
    after = made.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in parameters_of(made).values())
    assert torch.equal(torch.get_rng_state(), random)
    assert not modules._global_forward_hooks


def test_the_same_seed_gives_the_same_reference():
    one, other = reference()[1], reference()[1]
    assert one == other


def test_a_loss_that_reads_the_weights_has_its_reference_in_float32():
    model = Net()
    targets = Loss(torch.randint(4, (16,)))

    def decayed(output):
        return targets(output) + 1e-2 * model.head.weight.square().sum()

    made, start = workload(lambda: model, decayed)
    data, found = reference(made, start)
    assert found.precision == "float32"
    assert "the loss reads the weights of the model" in found.note
    assert found.explained["same"][GRADIENTS].relative_l2 > 1e-8
    assert data["right"][0][GRADIENTS]["head.weight"].dtype == torch.float32


def test_a_loss_that_float64_does_not_fit_has_its_reference_in_float32():
    targets = torch.randn(16, 4)

    def product(output):
        return torch.mm(output, targets.T).square().mean()

    _, found = reference(loss=product)
    assert found.precision == "float32"
    assert "float64 cannot run" in found.note
    assert found.repeatable


class Chooses(nn.Module):
    """Takes images and two indices into them, which random values may exceed."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x, size):
        assert int(size[0]) == len(x)
        return self.head(x)


def test_the_given_inputs_are_used_where_random_ones_do_not_fit():
    loss = Loss(torch.tensor([0, 1, 2]))
    inputs = (torch.randn(3, 4), torch.tensor([3, 7]))
    made = with_optimizer(Workload.training(Chooses(), inputs, loss, torch.optim.SGD))
    data, found = make_reference(made, 2, Start(made))
    assert not found.fresh
    assert "random inputs do not fit" in found.note
    assert len(data["sets"]) == 2
    assert not torch.equal(data["own"][0][0], data["own"][1][0])


def test_an_optimizer_that_draws_random_numbers_is_noted():
    class Langevin(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(torch.randn_like(p), alpha=1e-2)

    data, found = reference(optimizer=lambda p: Langevin(p, lr=0.1))
    assert not data["steps"]
    assert "updates were not compared" in found.note


def test_what_is_saved_can_be_loaded_without_running_code(tmp_path):
    data, _ = reference()
    torch.save(data, tmp_path / "reference.pt")
    found = torch.load(tmp_path / "reference.pt", weights_only=True, mmap=True)
    expected = data["right"][1][GRADIENTS]["conv.weight"]
    assert torch.equal(found["right"][1][GRADIENTS]["conv.weight"], expected)
