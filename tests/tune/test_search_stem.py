"""How a fused stem is cut up is chosen once, before any candidate is made of it."""

import pytest
from scripted import EAGER, FOLD, LAYOUT, MS, Act, Notes, Stage, died, make_search

from steadytorch.transforms.base import TransformSpec
from steadytorch.tune.select import Options

CONFIG = "64x32x7-w4s1"


def fused(config="", residual=False):
    asked = (("stem", True), ("residual", residual), ("config", config))
    return TransformSpec("fused_kernels", asked)


PLAIN = TransformSpec("fused_kernels", (("stem", False), ("residual", False), ("config", "")))
FAST = {(FOLD, fused(CONFIG)): Act(5 * MS), (EAGER,): Act(9 * MS)}
UNFILLED = {(FOLD, fused()): Act(5 * MS), (EAGER,): Act(9 * MS)}


def test_it_is_chosen_where_the_stem_is_fused_and_for_no_longer_than_the_budget_allows():
    asked = []

    def choose(prefix, seconds):
        asked.append((prefix, seconds))
        return CONFIG

    available = [EAGER, FOLD, LAYOUT, PLAIN, fused(), fused(residual=True)]
    make_search(Stage(FAST), available, Options(budget_s=100.0), choose_stem=choose).run()
    ((prefix, seconds),) = asked
    assert prefix == (FOLD, fused(), LAYOUT)
    assert 0 < seconds <= 0.1 * 100


def test_candidates_are_made_with_what_was_chosen():
    notes = Notes()
    available = [EAGER, FOLD, PLAIN, fused(), fused(residual=True)]
    both = {**FAST, (FOLD, fused(CONFIG, residual=True)): Act(4 * MS)}
    result = make_search(
        Stage(both), available, watcher=notes, choose_stem=lambda prefix, seconds: CONFIG
    ).run()
    assert result.chosen == (FOLD, fused(CONFIG, residual=True))
    tried = {spec for trial in result.candidates for spec in trial.transforms}
    assert {fused(CONFIG), fused(CONFIG, residual=True), PLAIN} <= tried
    assert not {fused(), fused(residual=True)} & tried
    assert "choosing how the stem is cut up" in notes.phases


def test_where_none_can_be_chosen_the_stem_is_tried_as_it_follows_from_the_sizes():
    def choose(prefix, seconds):
        raise died()

    result = make_search(Stage(UNFILLED), [EAGER, FOLD, fused()], choose_stem=choose).run()
    assert result.chosen == (FOLD, fused())


@pytest.mark.parametrize("available", [[EAGER, PLAIN], [EAGER]])
def test_nobody_is_asked_where_there_is_no_stem(available):
    def choose(prefix, seconds):
        raise AssertionError("a configuration was chosen for nothing")

    assert make_search(Stage(FAST), available, choose_stem=choose).run().chosen == (EAGER,)
