"""What held the clock, from a recording."""

from __future__ import annotations

import numpy as np
import pytest
import rival_power

from steadytorch.device.recording import REASON_BITS, Recording

POWER = REASON_BITS["power_cap"]
MS = 1_000_000


def recording(**columns):
    at = tuple(range(0, 1000, 100))
    return Recording(device="cuda", interval_ns=100, at_ns=at, **columns)


def test_readings_count_that_were_taken_within_the_spans():
    """What a tick holds may have been read two ticks before."""
    given = recording(
        clock_event_mask=(0, 0, POWER, POWER, POWER, POWER, 0, 0, 0, 0),
        sm_clock_mhz=(1980, 1980, 1700, 1710, 1720, 1730, 1980, 1980, 1980, 1980),
        power_milliwatts=(200_000,) * 2 + (699_000,) * 4 + (200_000,) * 4,
    )
    found = rival_power.power_of(given, [(150, 550)], [[70, 70]], [])
    assert found.pop("finding").startswith("the power limit holds the GPU clock down for 100 %")
    assert found == {
        "clock_share": None,
        "held": 1.0,
        "sm_clock_mhz": 1725.0,  # of 400 and 500
        "power_watts": pytest.approx(699.0),
        "variance_share": None,
    }
    assert rival_power.power_of(given, [(300, 950)], [[9]], [])["held"] == pytest.approx(0.2)
    late = rival_power.power_of(given, [(600, 950)], [[100, 100]], [])
    assert (late["held"], late["finding"]) == (0.0, None)


@pytest.mark.parametrize("spans", [[], [(0, 500)], [(110, 120), (130, 320)]])
def test_what_was_not_recorded_is_none(spans):
    names = ("clock_share", "held", "sm_clock_mhz", "power_watts", "finding", "variance_share")
    blocks = [[50, 50]] * len(spans)
    assert rival_power.power_of(None, spans, blocks, []) == dict.fromkeys(names)
    assert rival_power.power_of(recording(), spans, blocks, []) == dict.fromkeys(names)


def test_spans_too_short_for_a_reading_have_none():
    given = recording(clock_event_mask=(POWER,) * 10, sm_clock_mhz=(1700,) * 10)
    found = rival_power.power_of(given, [(110, 120), (130, 320)], [[9], [9]], [])
    assert set(found.values()) == {None}


def turns(ours_mask, slow_mhz, others_mask, others_mhz):
    """Ours has 50 ms of every 200, and is slower in one second of three; others have the rest."""
    rng = np.random.default_rng(0)
    at = np.arange(0, 60_000, 5) * MS
    begun = np.arange(100, 59_900, 200) * MS
    slow = (at // (1000 * MS)) % 3 == 2
    own = (at - begun[0]) % (200 * MS) <= 50 * MS
    given = Recording(
        device="cuda",
        interval_ns=5 * MS,
        at_ns=tuple(at.tolist()),
        sm_clock_mhz=tuple(
            np.where(own, np.where(slow, slow_mhz, 1980), others_mhz).tolist(),
        ),
        clock_event_mask=tuple(
            np.where(own, np.where(slow, ours_mask, 0), others_mask).tolist(),
        ),
    )
    level = np.where((begun // (1000 * MS)) % 3 == 2, 1980 / 1920, 1.0)
    blocks = [(4.5 * MS * each * rng.normal(1, 1e-3, 10)).astype(int).tolist() for each in level]
    spans = [(int(begin), int(begin) + 50 * MS) for begin in begun]
    return rival_power.power_of(given, spans, blocks, [])


def test_what_follows_the_clock_of_its_own_turns_is_put_down_to_the_limit():
    found = turns(POWER, 1920, 0, 1980)
    assert found["finding"].startswith("the power limit holds the GPU clock down for ")
    assert found["variance_share"] > 0.6  # the first of a block have the reading of the one before
    assert found["held"] == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("slow_mhz", [1980, 1920])
def test_the_clock_of_other_turns_explains_nothing(slow_mhz):
    found = turns(0, slow_mhz, POWER, 1700)
    assert (found["held"], found["finding"], found["variance_share"]) == (0.0, None, None)


@pytest.mark.parametrize("recorded", [None, recording()])
def test_turns_too_short_for_a_reading_follow_the_clock_that_was_counted(recorded):
    rng = np.random.default_rng(0)
    clocks = 1800 + 60 * np.sin(np.arange(300) / 7)
    times = 4.5 * MS * 1980 / clocks * rng.normal(1, 1e-3, 300)
    blocks = [each.astype(int).tolist() for each in np.split(times, 60)]
    spans = [(k, k) for k in range(60)]
    found = rival_power.power_of(recorded, spans, blocks, clocks.tolist())
    assert found.pop("clock_share") > 0.95
    assert set(found.values()) == {None}
    other = rng.permutation(clocks).tolist()
    for counted in (other, [float("nan")] * 300, []):
        assert rival_power.power_of(recorded, spans, blocks, counted)["clock_share"] is None


def test_nothing_is_recorded_on_the_cpu():
    ran = []
    assert rival_power.recorded("cpu", lambda: ran.append(1)) is None
    assert ran == [1]
