from __future__ import annotations

import numpy as np

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules import input_pipeline
from steadytorch.rules.script_work import NAME, rule

from ..findings.cases import MS, the, watched


def test_a_tenth_of_the_time_is_reported_with_its_line():
    found = the(rule(watched(rest=2 * MS, lines={"rest": (("train.py:3 main", 0.8),)})))
    assert found.id == NAME
    assert found.cost_ns == 2 * MS
    assert "mostly train.py:3 main" in found.title
    assert found.evidence[0] == "train.py:3 main: 80 % of it"


def test_rare_long_pauses_are_reported_by_their_variance():
    pauses = np.zeros(100)
    pauses[::50] = 30 * MS
    found = the(rule(watched(rest=pauses)))
    assert found.variance_share > 0.9


def test_a_pause_that_happens_once_is_not():
    pauses = np.zeros(100)
    pauses[40] = 300 * MS
    assert rule(watched(rest=pauses)) == ()


def test_pauses_that_wait_for_a_core_are_not():
    pauses = np.zeros(100)
    pauses[[20, 50, 80]] = 30 * MS
    assert rule(watched(rest=pauses)) != ()
    assert rule(watched(rest=pauses, contended=(20, 50, 80))) == ()
    assert rule(watched(rest=2 * MS + pauses, contended=tuple(range(100)))) == ()


def test_the_usual_rest_is_not():
    assert rule(watched(rest=0.5 * MS)) == ()
    uneven = np.random.default_rng(0).normal(MS, 0.1 * MS, 100)
    assert rule(watched(forward=uneven, rest=0.5 * MS)) == ()


def test_losses_and_clipping_do_not_count():
    assert rule(watched(rest=2 * MS, routine=0.6)) == ()
    assert rule(watched(rest=2 * MS, routine=1.0)) == ()
    found = the(rule(watched(rest=4 * MS, routine=0.25)))
    assert found.cost_ns == 3 * MS
    uneven = np.random.default_rng(0).normal(MS, 0.3 * MS, 100)
    assert rule(watched(rest=uneven, routine=0.5)) != ()
    assert rule(watched(rest=uneven, routine=0.9)) == ()


def test_without_a_script_it_abstains():
    assert isinstance(rule(Case()), Abstention)


def test_waiting_for_data_is_the_input_pipeline():
    case = watched(input_wait=3 * MS)
    assert rule(case) == ()
    assert the(input_pipeline.rule(case)).cost_ns == 3 * MS
    assert input_pipeline.rule(watched(input_wait=0.1 * MS)) == ()
