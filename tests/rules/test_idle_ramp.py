from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.idle_ramp import NAME, rule

from ..findings.cases import MS, US, launch, step, the, traced


def _probe(slower, spread=0.002, rounds=10, seed=3, **more) -> dict[str, Any]:
    """The capture's note: calls after 10 and 100 ms, the latter `slower` by this share."""
    normal = np.random.default_rng(seed).standard_normal

    def taken(middle):
        return (middle * (1 + spread * normal(rounds))).astype(int).tolist()

    after, steady = [taken(900 * US), taken(900 * US * (1 + slower))], taken(900 * US)
    return {
        "pause_ms": [10, 100],
        "after_ns": [float(np.median(times)) for times in after],
        "steady_ns": float(np.median(steady)),
        "rounds": rounds,
        "after_samples_ns": after,
        "steady_samples_ns": steady,
    } | more


RECORDED = {
    "pause_ms": [10, 100],
    "after_ns": [2541295.0, 2782365.0],
    "steady_ns": 2314006.5,
    "rounds": 10,
    "after_samples_ns": [
        [4434223, 2581415, 2534240, 2538430, 2470479, 2665649, 2498005, 2644049, 2492747, 2544160],
        [3685106, 2761289, 2551341, 2512871, 2655444, 3182646, 2788269, 2778526, 2786204, 2792815],
    ],
    "steady_samples_ns": [
        *(2512526, 2326996, 2294566, 2306799, 2301523, 2387563, 2266712, 2334725, 2319895, 2308118)
    ],
}
"""ResNet-50 at batch 1, eager, on an H200 with nothing else on it."""


def _steps(pause_ns):
    events = []
    for k in range(4):
        at = k * (pause_ns + 2 * MS) + pause_ns
        events.append(step(k + 1, at - pause_ns, at + 2 * MS))
        events += launch("k", call=(at, at + 9), gpu=(at + 9 * US, at + 2 * MS), correlation=k + 1)
    return events


def test_slower_calls_of_a_program_that_pauses_are_found():
    found = the(rule(traced(_steps(120 * MS), notes={"pause_probe": _probe(0.09)})))
    assert found.id == NAME
    assert found.cost_ns == pytest.approx(0.09 * 900 * US, rel=0.1)
    assert "100 ms" in found.title
    assert len(found.evidence) == 2


def test_pauses_longer_than_the_programs_own_do_not_count():
    probe = {**RECORDED, "asked": False}
    found = the(rule(traced(_steps(20 * MS), notes={"pause_probe": probe})))
    assert "a pause of 10 ms takes 9.8 % longer" in found.title
    assert "100 ms" not in " ".join(found.evidence)
    slower_after_100_ms = {"pause_probe": _probe(0.09)}
    assert rule(traced(_steps(20 * MS), notes=slower_after_100_ms)) == ()


def test_an_h200_is_slower_after_pauses():
    found = the(rule(Case(notes={"pause_probe": RECORDED | {"asked": True}})))
    assert "100 ms takes 20 % longer" in found.title
    assert len(found.evidence) == 2


def test_whoever_asks_about_pauses_is_told():
    case = traced(_steps(0), notes={"pause_probe": _probe(0.09, asked=True)})
    assert the(rule(case)).id == NAME


def test_a_program_that_does_not_pause_never_pays_for_it():
    """Calls after a pause are slower on most machines, quiet ones included."""
    assert rule(traced(_steps(0), notes={"pause_probe": _probe(0.09)})) == ()


def test_a_difference_that_does_not_matter_is_none():
    assert rule(Case(notes={"pause_probe": _probe(0.02, asked=True)})) == ()


def test_a_difference_that_chance_explains_is_none():
    case = Case(notes={"pause_probe": _probe(0.04, spread=0.2, asked=True)})
    assert rule(case) == ()


def test_too_few_calls_to_rule_chance_out_are_no_acquittal():
    probe = _probe(0.5, rounds=3, asked=True)
    found = rule(Case(notes={"pause_probe": probe}))
    assert isinstance(found, Abstention)
    assert "3 of 5 rounds" in found.why
    assert rule(Case(notes={"pause_probe": _probe(0.0, rounds=3, asked=True)})) == ()


def test_a_program_that_pauses_and_was_not_probed_cannot_be_judged():
    said = rule(traced(_steps(20 * MS)))
    assert isinstance(said, Abstention)
    assert isinstance(rule(Case()), Abstention)
    assert rule(traced(_steps(0))) == ()


@given(st.integers(0, 1000), st.floats(0.001, 0.5))
def test_a_call_that_is_faster_after_a_pause_is_never_blamed(seed, spread):
    probe = _probe(-0.5, spread=spread, seed=seed, asked=True)
    probe["pause_ms"], probe["after_ns"] = [100], probe["after_ns"][1:]
    probe["after_samples_ns"] = probe["after_samples_ns"][1:]
    verdict = rule(Case(notes={"pause_probe": probe}))
    assert verdict == () or probe["after_ns"][0] > 1.03 * probe["steady_ns"]


def test_without_samples_nothing_rules_out_chance():
    probe = _probe(0.5)
    del probe["after_samples_ns"], probe["steady_samples_ns"]
    assert rule(Case(notes={"pause_probe": probe})) == ()
