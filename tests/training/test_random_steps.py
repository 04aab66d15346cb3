from __future__ import annotations

import pytest
import torch

from steadytorch.training.random_steps import (
    FIRST_SEED,
    NOT_ADVANCED,
    SAME_NUMBERS,
    SEEDS,
    difference,
    drawing_fault,
    summaries,
)
from steadytorch.verification.verdict import LEVEL

from . import drawing


@pytest.fixture(autouse=True)
def one_thread():
    """The networks are tiny: more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SEEDS_TRIED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


def verdict(seed: int, drop) -> tuple[str | None, float]:
    made, start = drawing.workload(seed)
    arguments = (made.inputs, {})
    model = drawing.variant(made, drop)
    fault = drawing_fault(made, model, arguments, start)
    right = summaries(made, made.model, arguments, start)
    found = summaries(made, model, arguments, start, FIRST_SEED + SEEDS)
    return fault, difference(found, right, "same")[0]


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
