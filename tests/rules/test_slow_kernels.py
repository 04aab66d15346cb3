from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.slow_kernels import NAME, rule

from ..findings.cases import MS, US, kernel, launch, op, step, the, traced

MATRICES = {"dims": [[64, 64]] * 2, "types": ["float"] * 2}


def _steps(*times, shapes=None, name="k"):
    """One step for each list of kernel times, one kernel after the other."""
    events, correlation = [], 0
    for number, lengths in enumerate(times):
        begin, at = number * 10 * MS, number * 10 * MS + MS
        events.append(step(number + 1, begin, begin + 10 * MS))
        for length in lengths:
            correlation += 1
            host = begin + correlation * 10 * US
            if shapes:
                events.append(op("aten::mm", host, host + 9 * US, **shapes))
            events += launch(
                name,
                call=(host + US, host + 2 * US),
                gpu=(at, at + length),
                correlation=correlation,
            )
            at += length + US
    return events


def test_a_kernel_that_takes_longer_in_one_step_is_found():
    found = the(rule(traced(_steps([100 * US] * 4, [100 * US] * 4, [100 * US] * 3 + [300 * US]))))
    assert found.id == NAME
    assert found.cost_ns == 200 * US // 3
    assert "3.0 times" in found.title
    assert "in 1 of 3 steps" in found.evidence
    assert found.source == "hardware contention"


def test_steady_kernels_are_not():
    assert rule(traced(_steps(*[[100 * US, 130 * US]] * 4))) == ()


def test_places_in_a_step_are_compared_with_themselves():
    """A kernel whose data is in cache is faster each time; that is no fault."""
    assert rule(traced(_steps(*[[100 * US, 300 * US]] * 4, shapes=MATRICES))) == ()


def test_without_like_steps_the_same_shapes_are_compared():
    found = the(rule(traced(_steps([100 * US] * 9 + [300 * US], shapes=MATRICES))))
    assert found.confidence == "low"
    assert found.cost_ns == 200 * US


def test_other_shapes_are_other_work():
    other = {"dims": [[999, 64], [64, 64]], "types": ["float"] * 2}
    events = _steps([100 * US] * 5, shapes=MATRICES)
    late = [op("aten::mm", 8 * MS, 8 * MS + 9 * US, **other)]
    late += launch(
        "k", call=(8 * MS + US, 8 * MS + 2 * US), gpu=(9 * MS, 9 * MS + 400 * US), correlation=99
    )
    assert rule(traced([*events, *late])) == ()


def test_kernels_that_run_beside_others_are_left_out():
    events = _steps([100 * US] * 4, [100 * US] * 4, [100 * US] * 3 + [300 * US])
    slow = max(event.start_ns for event in events if event.name == "k")
    # Also its counterparts in other steps, so that steps stay equal.
    beside = [
        kernel("other", slow - ago, slow - ago + 10 * US, correlation=500 + ago, stream=20)
        for ago in (0, 10 * MS, 20 * MS)
    ]
    assert the(rule(traced(events)))
    assert rule(traced([*events, *beside])) == ()


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"])
def test_collectives_wait_for_other_devices(name):
    times = [100 * US] * 4, [100 * US] * 4, [100 * US] * 3 + [900 * US]
    assert rule(traced(_steps(*times, name=name))) == ()


def test_short_kernels_are_left_out():
    assert rule(traced(_steps([2 * US] * 4, [2 * US] * 4, [2 * US] * 3 + [9 * US]))) == ()


def test_one_step_without_shapes_abstains():
    verdict = rule(traced(_steps([100 * US] * 4)))
    assert isinstance(verdict, Abstention)
    assert "record_shapes" in verdict.recapture


def test_without_a_gpu_it_abstains():
    assert isinstance(rule(traced([op("aten::mm", 0, MS)])), Abstention)
    assert isinstance(rule(Case()), Abstention)
