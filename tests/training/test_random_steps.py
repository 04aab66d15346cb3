from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch.training.random_steps import (
    FIRST_SEED,
    NOT_ADVANCED,
    SAME_NUMBERS,
    SEEDS,
    difference,
    drawing_fault,
    summaries,
)
from steadytorch.training.reference import make_reference
from steadytorch.verification.verdict import LEVEL
from steadytorch.workload.start import Start, with_optimizer
from steadytorch.workload.workload import Workload

from . import drawing

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS_TRIED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


@cache
def referred(seed: int):
    """A workload, its start, what rounding explains, and the summaries of its own model."""
    made, start = drawing.workload(seed)
    rounding = make_reference(made, 0, start)[0]["rounding"]
    right = summaries(made, made.model, (made.inputs, {}), start, rounding["bf16"])
    return made, start, rounding, right


def verdict(seed: int, drop) -> tuple[str | None, float]:
    made, start, rounding, right = referred(seed)
    arguments = (made.inputs, {})
    model = drawing.variant(made, drop)
    fault = drawing_fault(made, model, arguments, start)
    found = summaries(made, model, arguments, start, rounding["bf16"], FIRST_SEED + SEEDS)
    return fault, difference(found, right, "same", rounding["same"])[0]


@pytest.mark.parametrize("seed", SEEDS_TRIED)
@pytest.mark.parametrize("drop", [drawing.shared, drawing.redrawn, drawing.off_by_a_tenth])
def test_masks_that_are_wrong_show_in_the_distribution(drop, seed):
    fault, p_value = verdict(seed, drop)
    assert fault is None
    assert p_value <= LEVEL


@pytest.mark.parametrize("seed", SEEDS_TRIED)
def test_other_numbers_of_the_same_distribution_pass(seed):
    fault, p_value = verdict(seed, drawing.sound)
    assert fault is None
    assert p_value > LEVEL


def test_a_mask_that_never_changes_is_a_fault():
    assert verdict(0, drawing.baked)[0] == SAME_NUMBERS


@pytest.mark.parametrize("drop", [drawing.rare, drawing.without_effect])
def test_draws_that_seldom_or_never_matter_are_no_fault(drop):
    made, start = drawing.workload(0)
    made.model.drop = drop
    assert drawing_fault(made, made.model, (made.inputs, {}), start) is None


def test_a_generator_that_stands_still_is_a_fault():
    assert verdict(0, drawing.not_advanced)[0] == NOT_ADVANCED


class Kinked(nn.Module):
    """Convolutions and batch norms, whose gradients bf16 moves by a third; dropout at the end."""

    def __init__(self):
        super().__init__()
        widths = [3, *[8] * 12]
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.Hardswish()
            )
            for a, b in pairwise(widths)
        )
        self.hidden, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.drop = lambda x: functional.dropout(x, drawing.RATE, True)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = torch.relu(self.hidden(x.mean((2, 3))))
        return self.head(self.drop(x))


def kinked(seed: int, drop) -> tuple[float, str]:
    """What is said of the kinked network in bf16 with a dropout of its own."""
    torch.manual_seed(seed)
    model = Kinked()
    x, y = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = with_optimizer(
        Workload.training(model, x, functional.cross_entropy, optimizer, targets=y)
    )
    start, arguments = Start(made), (made.inputs, {})
    rounding = make_reference(made, 0, start)[0]["rounding"]["bf16"]
    right = summaries(made, model, arguments, start, rounding)

    def other(x):
        own, model.drop = model.drop, drop
        try:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)
        finally:
            model.drop = own

    found = summaries(made, other, arguments, start, rounding, FIRST_SEED + SEEDS)
    return difference(found, right, "bf16", rounding)


@pytest.mark.parametrize("seed", SEEDS_TRIED)
def test_rounding_is_no_difference(seed):
    p_value, differs = kinked(seed, drawing.sound)
    assert p_value > LEVEL, differs


@pytest.mark.slow
@pytest.mark.parametrize("drop", [drawing.shared, drawing.redrawn, drawing.off_by_a_tenth])
def test_rounding_does_not_hide_wrong_masks(drop):
    assert kinked(3, drop)[0] <= LEVEL
