from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.neighbour_process import NAME, rule

from ..findings.cases import MS, US, launch, never, noise, step, the, timed, traced


def _shared_by_turns(worst):
    """Profiled steps whose one kernel takes up to `worst` times its best."""
    events = [step(1, 0, 100 * MS)]
    lengths = np.linspace(100 * US, worst * 100 * US, 40).astype(int)
    for number, length in enumerate(lengths.tolist(), 1):
        at = number * 2 * MS
        events += launch(
            "k", call=(at, at + US), gpu=(at + 2 * US, at + 2 * US + length), correlation=number
        )
    case = traced(events)
    return {"trace": case.trace, "ledger": case.ledger}


def test_a_neighbour_that_comes_and_goes_is_found_by_what_it_costs():
    times = noise(1000)
    times[500:800] *= 2
    began, ended = times[:500].sum(), times[:800].sum()
    case = timed(times, other_gpu_processes=lambda at: (began <= at) & (at < ended))
    found = the(rule(case))
    assert found.id == NAME
    assert found.confidence == "high"
    assert found.variance_share > 0.9
    assert found.cost_ns == pytest.approx(0.3 * 3 * MS * 0.5, rel=0.1)


def test_a_neighbour_all_along_is_found_by_the_kernels_it_holds_up():
    case = timed(noise(200), other_gpu_processes=lambda at: never(at) + 2, **_shared_by_turns(4))
    found = the(rule(case))
    assert found.confidence == "medium"
    assert found.cost_ns > MS
    assert "2 other processes" in found.title


def test_a_neighbour_that_shows_no_effect_has_low_confidence_and_no_cost():
    case = timed(noise(200), other_gpu_processes=lambda at: never(at) + 1, **_shared_by_turns(1.1))
    found = the(rule(case))
    assert (found.confidence, found.cost_ns) == ("low", 0)


def test_contexts_of_the_session_itself_are_no_neighbours():
    case = timed(noise(50), other_gpu_processes=lambda at: never(at) + 1, notes={"own_contexts": 1})
    assert rule(case) == ()


def test_a_program_on_the_cpu_shares_no_gpu():
    assert rule(timed(noise(50), device="cpu")) == ()


def test_without_the_drivers_list_it_abstains():
    said = rule(timed(noise(50), unknown={"other_gpu_processes": "a container"}))
    assert isinstance(said, Abstention)
    assert "a container" in said.why
    assert isinstance(rule(Case()), Abstention)


@given(st.lists(st.integers(100_000, 20 * MS), min_size=5, max_size=80))
def test_alone_on_the_gpu_nothing_is_ever_found(times):
    """Without a neighbour there is no finding, however samples and kernels vary."""
    assert rule(timed(times, other_gpu_processes=never)) == ()
