from __future__ import annotations

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.evaluation import NAME, rule

from ..findings.cases import MS, the, watched


def test_a_fifth_of_the_time_is_reported_with_its_line():
    lines = {"evaluation": (("train.py:9 validate", 1.0),)}
    found = the(rule(watched(lines, backward=10 * MS, evaluation=5 * MS)))
    assert found.id == NAME
    assert found.cost_ns == 5 * MS
    assert found.title.endswith("mostly train.py:9 validate")


def test_less_is_not_and_neither_is_inference():
    assert rule(watched(backward=10 * MS, evaluation=4 * MS)) == ()
    assert rule(watched(evaluation=50 * MS)) == ()


def test_without_a_script_it_abstains():
    assert isinstance(rule(Case()), Abstention)
