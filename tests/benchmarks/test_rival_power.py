"""What held the clock, from a recording."""

from __future__ import annotations

import pytest
import rival_power

from steadytorch.device.recording import REASON_BITS, Recording

POWER = REASON_BITS["power_cap"]


def recording(**columns):
    at = tuple(range(0, 1000, 100))
    return Recording(device="cuda", interval_ns=100, at_ns=at, **columns)


def test_the_power_limit_counts_within_the_spans_alone():
    given = recording(
        clock_event_mask=(0, 0, POWER, POWER, POWER, POWER, 0, 0, 0, 0),
        sm_clock_mhz=(1980, 1980, 1700, 1710, 1720, 1730, 1980, 1980, 1980, 1980),
        power_milliwatts=(200_000,) * 2 + (699_000,) * 4 + (200_000,) * 4,
    )
    assert rival_power.power_of(given, [(200, 350)]) == {
        "held": 1.0,
        "sm_clock_mhz": 1705.0,
        "power_watts": pytest.approx(699.0),
    }
    assert rival_power.power_of(given, [(0, 950)])["held"] == pytest.approx(0.4)
    assert rival_power.power_of(given, [(700, 950)])["held"] == 0.0


def test_a_span_between_two_ticks_has_the_reading_before_it():
    given = recording(clock_event_mask=(0, POWER, 0, 0, 0, 0, 0, 0, 0, 0))
    assert rival_power.power_of(given, [(110, 120), (130, 140)])["held"] == 1.0


@pytest.mark.parametrize("spans", [[], [(0, 100)]])
def test_what_was_not_recorded_is_none(spans):
    nothing = {"held": None, "sm_clock_mhz": None, "power_watts": None}
    assert rival_power.power_of(None, spans) == nothing
    assert rival_power.power_of(recording(), spans) == nothing


def test_nothing_is_recorded_on_the_cpu():
    ran = []
    assert rival_power.recorded("cpu", lambda: ran.append(1)) is None
    assert ran == [1]
