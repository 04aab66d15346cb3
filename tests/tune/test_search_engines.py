"""cuDNN engines are chosen once, before any candidate uses them."""

import sys

import pytest
import torch
from scripted import (
    DETERMINISTIC,
    EAGER,
    FOLD,
    LAYOUT,
    MS,
    TF32,
    Act,
    Elsewhere,
    Notes,
    Stage,
    died,
    make_search,
    workload,
)

from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import setup_scheduler
from steadytorch.tune.search import Search, compiling
from steadytorch.tune.select import SearchOptions
from steadytorch.workload.workload import Workload

UNCHOSEN = TransformSpec("cudnn_engines", (("choices", ""),))
KEY = "fprop/bias/fp16/last/i8x64x28x28/w64x64x1x1/s1x1/p0x0/d1x1/g1"
CHOICES = f'{{"{KEY}": "eng1"}}'
CHOSEN = TransformSpec("cudnn_engines", (("choices", CHOICES),))
FROZEN = TransformSpec("compile", (("mode", "default"), ("freezing", True)))
PLAIN = TransformSpec("compile", (("mode", "default"), ("freezing", False)))
FAST = {(FOLD, LAYOUT, CHOSEN): Act(5 * MS), (EAGER,): Act(9 * MS)}


def test_engines_are_chosen_under_the_layout_and_for_no_longer_than_the_budget_allows():
    asked = []

    def choose(prefix, seconds):
        asked.append((prefix, seconds))
        return CHOICES

    make_search(
        Stage(FAST),
        [EAGER, FOLD, LAYOUT, UNCHOSEN],
        SearchOptions(budget_s=100.0),
        choose_engines=choose,
    ).run()
    ((prefix, seconds),) = asked
    assert prefix == (FOLD, LAYOUT)
    assert 0 < seconds <= 0.3 * 100


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
    assert "choosing a cuDNN engine for each convolution" in notes.phases


def test_where_none_can_be_chosen_the_others_are_tried_and_it_is_said_why():
    def choose(prefix, seconds):
        raise died()

    result = make_search(Stage(FAST), [EAGER, UNCHOSEN], choose_engines=choose).run()
    assert result.chosen == (EAGER,)
    assert result.not_applicable["cudnn_engines"] == (
        "no engine could be chosen: segmentation fault (SIGSEGV)"
    )


@pytest.mark.parametrize("available", [[EAGER, DETERMINISTIC], [EAGER]])
def test_nobody_is_asked_where_the_transform_does_not_apply(available):
    def choose(prefix, seconds):
        raise AssertionError("engines were chosen for nothing")

    assert make_search(Stage(FAST), available, choose_engines=choose).run().chosen == (EAGER,)


@pytest.mark.parametrize("answer", [CHOICES, died()], ids=["chosen", "not chosen"])
def test_what_compiles_without_engines_is_set_up_meanwhile_and_once(monkeypatch, answer):
    def choose(prefix, seconds):
        try:
            return search._scheduler.pump_until(Elsewhere(50, answer), 60.0)
        finally:
            before.extend(stage.tried())

    monkeypatch.setattr(setup_scheduler, "wait_any", lambda workers, seconds: None)
    monkeypatch.setattr(sys.modules[Search.__module__], "ENOUGH", 0.0)  # all are tried
    before = []
    stage = Stage({(LAYOUT, FROZEN): Act(5 * MS, setup_s=30.0), (EAGER,): Act(9 * MS)})
    available = [EAGER, LAYOUT, UNCHOSEN, FROZEN, PLAIN]
    options = SearchOptions(budget_s=200.0)
    search = make_search(stage, available, options, slots=4, choose_engines=choose)
    result = search.run()
    assert before == [(), (LAYOUT, FROZEN)]
    assert len(stage.tried()) == len(set(stage.tried()))
    assert ((LAYOUT, CHOSEN, FROZEN) in stage.tried()) == (answer is CHOICES)
    assert result.chosen == (LAYOUT, FROZEN)


def test_what_was_begun_is_told_where_the_search_is_broken_off(monkeypatch):
    def choose(prefix, seconds):
        search._scheduler.pump_until(Elsewhere(50, CHOICES), 60.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_scheduler, "wait_any", lambda workers, seconds: None)
    stage = Stage()
    search = make_search(stage, [LAYOUT, UNCHOSEN, FROZEN], choose_engines=choose)
    result = search.run()
    assert result.interrupted
    assert (LAYOUT, FROZEN) in [trial.transforms for trial in result.candidates]
    assert not any(worker.alive for worker in stage.workers)


def test_no_more_than_the_cores_can_share_compile_in_one_round():
    most = []

    class Watched(Stage):
        def exchange(self):
            super().exchange()
            now = search._scheduler.begun
            most.append(sum(any(spec.name == "compile" for spec in c) for c in now))

    stage = Watched({(LAYOUT, FROZEN): Act(5 * MS)})
    available = [EAGER, FOLD, LAYOUT, TF32, FROZEN, PLAIN]
    options = SearchOptions(budget_s=500.0, precision="tf32")
    search = make_search(stage, available, options, slots=8)
    search.run()
    assert max(most) == compiling(8, on_cpu=True)


def _training():
    inference = workload()
    return Workload.training(inference.model, inference.inputs, torch.sum, torch.optim.SGD)


def test_training_chooses_no_engines_where_compiled_code_leads():
    def choose(prefix, seconds):
        raise AssertionError("engines were chosen for nothing")

    available = [LAYOUT, UNCHOSEN, PLAIN]
    stage = Stage({(LAYOUT, PLAIN): Act(5 * MS)})
    result = make_search(stage, available, choose_engines=choose, of=_training()).run()
    assert result.chosen == (LAYOUT, PLAIN)
    assert "compiled code leads" in result.not_tried["cudnn_engines"]


@pytest.mark.parametrize("compiled", [[], [PLAIN]], ids=["no compiler", "compiled code is slower"])
def test_training_chooses_engines_after_other_combinations_were_timed(compiled):
    stage = Stage({(LAYOUT,): Act(8 * MS), (LAYOUT, CHOSEN): Act(5 * MS)})
    timed = []

    def choose(prefix, seconds):
        timed.extend(candidate for method, candidate in stage.events if method == "block")
        return CHOICES

    available = [LAYOUT, UNCHOSEN, *compiled]
    result = make_search(stage, available, choose_engines=choose, of=_training()).run()
    assert (LAYOUT,) in timed
    assert result.chosen == (LAYOUT, CHOSEN)
    assert "cudnn_engines" not in result.not_tried
