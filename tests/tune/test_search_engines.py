"""Engines of cuDNN are chosen once, before any candidate is made of them."""

import pytest
from scripted import EAGER, FOLD, GC, LAYOUT, MS, Act, Notes, Stage, died, make_search

from steadytorch.transforms.base import TransformSpec
from steadytorch.tune.select import Options

UNCHOSEN = TransformSpec("cudnn_engines", (("choices", ""),))
KEY = "fprop/bias/fp16/last/i8x64x28x28/w64x64x1x1/s1x1/p0x0/d1x1/g1"
CHOICES = f'{{"{KEY}": "eng1"}}'
CHOSEN = TransformSpec("cudnn_engines", (("choices", CHOICES),))
FAST = {(FOLD, LAYOUT, CHOSEN): Act(5 * MS), (EAGER,): Act(9 * MS)}


def test_engines_are_chosen_under_the_layout_and_for_no_longer_than_the_budget_allows():
    asked = []

    def choose(prefix, seconds):
        asked.append((prefix, seconds))
        return CHOICES

    make_search(
        Stage(FAST),
        [EAGER, FOLD, LAYOUT, UNCHOSEN],
        Options(budget_s=100.0),
        choose_engines=choose,
    ).run()
    ((prefix, seconds),) = asked
    assert prefix == (FOLD, LAYOUT)
    assert 0 < seconds <= 0.35 * 100


def test_candidates_are_made_with_the_engines_that_were_chosen():
    notes = Notes()
    result = make_search(
        Stage(FAST),
        [EAGER, FOLD, LAYOUT, UNCHOSEN],
        watcher=notes,
        choose_engines=lambda prefix, seconds: CHOICES,
    ).run()
    assert result.chosen == (FOLD, LAYOUT, CHOSEN)
    assert not any(UNCHOSEN in trial.transforms for trial in result.candidates)
    assert "choosing an engine of cuDNN for each convolution" in notes.phases


def test_where_none_can_be_chosen_the_others_are_tried_and_it_is_said_why():
    def choose(prefix, seconds):
        raise died()

    result = make_search(Stage(FAST), [EAGER, UNCHOSEN], choose_engines=choose).run()
    assert result.chosen == (EAGER,)
    assert result.not_applicable["cudnn_engines"] == (
        "no engine could be chosen: segmentation fault (SIGSEGV)"
    )


@pytest.mark.parametrize("available", [[EAGER, GC], [EAGER]])
def test_nobody_is_asked_where_the_transform_does_not_apply(available):
    def choose(prefix, seconds):
        raise AssertionError("engines were chosen for nothing")

    assert make_search(Stage(FAST), available, choose_engines=choose).run().chosen == (EAGER,)
