from __future__ import annotations

import numpy as np
import pytest

from steadytorch.device.recording import REASON_BITS
from steadytorch.explain.finding import Abstention, Case
from steadytorch.explain.rules.clock_throttled import NAME, rule

from .cases import MS, TICK, noise, op, the, timed, traced

CAPPED, HOT = REASON_BITS["power_cap"], REASON_BITS["hardware_thermal_slowdown"]
FAST, SLOW = 1900, 1710


def _capped(at):
    """Whether the clock is held: half a second in every two."""
    return (at // (500 * MS)) % 4 == 3


def _following(count=3000):
    """Samples that take as long as the clock of their time makes them."""
    times, at = noise(count, 6 * MS), 0.0
    for place in range(count):
        if _capped(int(at)):
            times[place] *= FAST / SLOW
        at += times[place]
    return times


@pytest.mark.parametrize("bit", [CAPPED, HOT])
def test_samples_that_follow_a_held_clock_are_found(bit):
    case = timed(
        _following(),
        sm_clock_mhz=lambda at: np.where(_capped(at), SLOW, FAST),
        clock_event_mask=lambda at: np.where(_capped(at), bit, 0),
    )
    found = the(rule(case))
    assert found.id == NAME
    assert found.variance_share > 0.8
    assert found.confidence == "high"
    assert ("heat" in found.title) == (bit == HOT)


def test_a_limit_that_holds_all_along_costs_time_and_makes_no_variance():
    case = timed(
        noise(1000),
        sm_clock_mhz=lambda at: np.where(at < 2 * TICK, FAST, SLOW),
        clock_event_mask=lambda at: np.full_like(at, CAPPED),
    )
    found = the(rule(case))
    assert found.confidence == "medium"
    assert found.cost_ns == pytest.approx(3 * MS * (1 - SLOW / FAST), rel=0.02)


@pytest.mark.parametrize("reason", ["gpu_idle", "clocks_setting", "sync_boost"])
def test_what_is_no_limit_of_power_or_heat_is_no_throttling(reason):
    case = timed(
        _following(),
        sm_clock_mhz=lambda at: np.where(_capped(at), SLOW, FAST),
        clock_event_mask=lambda at: np.full_like(at, REASON_BITS[reason]),
    )
    assert rule(case) == ()


def test_a_cap_that_samples_do_not_follow_is_not_blamed():
    case = timed(
        noise(3000, 6 * MS, 0.05),
        sm_clock_mhz=lambda at: np.where(_capped(at), SLOW, FAST),
        clock_event_mask=lambda at: np.where(_capped(at), CAPPED, 0),
    )
    assert rule(case) == ()


def test_growth_without_a_known_clock_is_named_with_low_confidence():
    times = noise(300) * np.geomspace(1, 4, 300)
    found = the(rule(timed(times, unknown={"clock_event_mask": "not supported"})))
    assert found.confidence == "low"


def test_growth_at_an_even_clock_is_not_heat():
    case = timed(
        noise(300) * np.geomspace(1, 4, 300),
        sm_clock_mhz=lambda at: np.full_like(at, FAST),
        clock_event_mask=lambda at: np.zeros_like(at),
    )
    assert rule(case) == ()


def test_without_the_reasons_it_abstains():
    said = rule(timed(noise(100), unknown={"clock_event_mask": "no permission"}))
    assert isinstance(said, Abstention)
    assert "no permission" in said.why
    assert isinstance(rule(Case()), Abstention)
    assert isinstance(rule(traced([op("aten::mm", 0, 9)])), Abstention)
