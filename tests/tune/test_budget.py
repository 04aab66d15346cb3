from __future__ import annotations

import pytest

from steadytorch.measure.race import LOOKS
from steadytorch.tune.budget import Budget
from steadytorch.tune.select import BlockShape


def after(spent_s, block_s):
    """A budget of 60 s of which so much is spent, where a block takes so long."""
    times = iter([0.0])
    budget = Budget(60.0, lambda: next(times, spent_s))
    budget.shape = BlockShape(8, block_s * 1e8)
    assert budget.shape.expected_s == pytest.approx(block_s)
    return budget


def test_all_looks_are_planned_where_they_fit():
    assert after(0.0, 1e-3).looks() == LOOKS


def test_looks_that_do_not_fit_are_not_planned():
    assert after(0.0, 30.0 / LOOKS[1] * 1.001).looks() == LOOKS[:1]
    assert after(0.0, 30.0 / LOOKS[1] * 0.999).looks() == LOOKS[:2]


@pytest.mark.parametrize("spent_s", [60.0, 300.0])
def test_one_look_is_always_taken(spent_s):
    assert after(spent_s, 1.0).looks() == LOOKS[:1]
