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


def test_the_power_limit_counts_within_the_spans_alone():
    given = recording(
        clock_event_mask=(0, 0, POWER, POWER, POWER, POWER, 0, 0, 0, 0),
        sm_clock_mhz=(1980, 1980, 1700, 1710, 1720, 1730, 1980, 1980, 1980, 1980),
        power_milliwatts=(200_000,) * 2 + (699_000,) * 4 + (200_000,) * 4,
    )
    found = rival_power.power_of(given, [(200, 350)], [[70, 70]])
    assert found.pop("finding").startswith("the power limit holds the GPU's clock for 100 %")
    assert found == {"held": 1.0, "sm_clock_mhz": 1705.0, "power_watts": pytest.approx(699.0)}
    assert rival_power.power_of(given, [(0, 950)], [[9]])["held"] == pytest.approx(0.4)
    late = rival_power.power_of(given, [(700, 950)], [[100, 100]])
    assert (late["held"], late["finding"]) == (0.0, None)


def test_a_span_between_two_ticks_has_the_reading_before_it():
    given = recording(clock_event_mask=(0, POWER, 0, 0, 0, 0, 0, 0, 0, 0))
    assert rival_power.power_of(given, [(110, 120), (130, 140)], [[9], [9]])["held"] == 1.0


@pytest.mark.parametrize("spans", [[], [(0, 100)]])
def test_what_was_not_recorded_is_none(spans):
    nothing = dict.fromkeys(("held", "sm_clock_mhz", "power_watts", "finding"))
    blocks = [[50, 50]] * len(spans)
    assert rival_power.power_of(None, spans, blocks) == nothing
    assert rival_power.power_of(recording(), spans, blocks) == nothing


@pytest.mark.parametrize("capped", [POWER, 0])
def test_blocks_that_follow_a_held_clock_are_told_from_others(capped):
    """Blocks of 10 ms every 100 ms; for a second in every three the clock is lower by 3 %."""
    rng = np.random.default_rng(0)
    at = np.arange(0, 30_000, 15) * MS
    slow = (at // (1000 * MS)) % 3 == 2
    given = Recording(
        device="cuda",
        interval_ns=15 * MS,
        at_ns=tuple(at.tolist()),
        sm_clock_mhz=tuple(np.where(slow, 1920, 1980).tolist()),
        clock_event_mask=tuple(np.where(slow, capped, 0).tolist()),
    )
    begun = [(100 * i + 40) * MS for i in range(299)]
    level = [1980 / 1920 if (begin // (1000 * MS)) % 3 == 2 else 1.0 for begin in begun]
    blocks = [(MS * each * rng.normal(1, 1e-3, 10)).astype(int).tolist() for each in level]
    spans = [(begin, begin + sum(block)) for begin, block in zip(begun, blocks, strict=True)]
    finding = rival_power.power_of(given, spans, blocks)["finding"]
    if capped:
        assert finding.startswith("the power limit holds the GPU's clock for 33 % of the time")
        assert int(finding.split()[-5]) > 80, finding
    else:
        assert finding is None


def test_nothing_is_recorded_on_the_cpu():
    ran = []
    assert rival_power.recorded("cpu", lambda: ran.append(1)) is None
    assert ran == [1]
