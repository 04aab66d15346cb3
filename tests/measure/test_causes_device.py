"""Outliers on a GPU: its clock, its neighbours, and the host that feeds it."""

from __future__ import annotations

import numpy as np
import pytest

from steadytorch.device.recording import REASON_BITS
from steadytorch.measure.causes import attribute

from .slowed import MS, START, THEN, TICKS, cause_of, collected, recorded, slowed


def _levels(device="cuda", *, clock=None, mask=None, others=None, at=THEN):
    """Levels that differ from the usual ones at the two ticks around tick `at`."""
    columns = {}
    for name, usual, then in (
        ("sm_clock_mhz", 1980, clock),
        ("clock_event_mask", 0, mask),
        ("other_gpu_processes", 0, others),
    ):
        column = [usual] * TICKS
        if then is not None:
            column[at : at + 2] = [then] * 2
        columns[name] = tuple(column)
    return recorded(device, **columns)


def _steady_host(count=100):
    return np.full(count, 3 * MS)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("power_cap", "power cap"),
        ("hardware_power_brake", "power cap"),
        ("thermal_slowdown", "thermal"),
        ("hardware_thermal_slowdown", "thermal"),
        ("hardware_slowdown", "clock"),
        ("clocks_setting", "clock"),
    ],
)
def test_a_fallen_clock_is_put_down_to_what_holds_it(reason, cause):
    recording = _levels(clock=1485, mask=REASON_BITS[reason])
    assert cause_of(recording, host_ns=_steady_host()) == cause


def test_heat_comes_before_power():
    mask = REASON_BITS["power_cap"] | REASON_BITS["thermal_slowdown"]
    assert cause_of(_levels(clock=1485, mask=mask), host_ns=_steady_host()) == "thermal"


def test_a_reason_without_a_fall_of_the_clock_explains_nothing():
    recording = _levels(mask=REASON_BITS["power_cap"])
    assert cause_of(recording, host_ns=_steady_host()) == "unattributed"


def test_a_small_fall_of_the_clock_explains_no_large_excess():
    recording = _levels(clock=1940, mask=REASON_BITS["power_cap"])
    assert cause_of(recording, host_ns=_steady_host()) == "unattributed"


def test_where_the_clock_is_unknown_a_new_reason_counts_and_a_standing_one_does_not():
    cap = REASON_BITS["power_cap"]
    new = tuple(cap if tick in (THEN, THEN + 1) else 0 for tick in range(TICKS))
    found = [
        cause_of(recorded("cuda", clock_event_mask=mask), host_ns=_steady_host())
        for mask in (new, (cap,) * TICKS)
    ]
    assert found == ["power cap", "unattributed"]


def _counted(at_30, others=1980.0):
    clocks = np.full(100, others)
    clocks[30] = at_30
    return clocks


@pytest.mark.parametrize(
    ("at_30", "cause"), [(1485.0, "power cap"), (1980.0, "unattributed"), (1940.0, "unattributed")]
)
def test_what_was_counted_over_an_outlier_goes_before_what_nvml_read(at_30, cause):
    mask = REASON_BITS["power_cap"]
    for read in (1485, 1980):
        recording = _levels(clock=read, mask=mask)
        found = cause_of(recording, host_ns=_steady_host(), clocks_mhz=_counted(at_30))
        assert found == cause


def test_a_counted_clock_that_nothing_was_seen_to_hold_is_the_cause_by_its_own_name():
    found = cause_of(recorded("cuda"), host_ns=_steady_host(), clocks_mhz=_counted(1485.0))
    assert found == "clock"


@pytest.mark.parametrize(
    "clocks", [_counted(np.nan), _counted(0.0), _counted(np.nan, np.nan), [None] * 100, []]
)
def test_a_clock_that_was_not_counted_over_the_outlier_is_read(clocks):
    assert cause_of(_levels(clock=1485), host_ns=_steady_host(), clocks_mhz=clocks) == "clock"


def test_samples_whose_clock_is_unknown_are_no_part_of_the_usual_one():
    clocks = _counted(1485.0)
    clocks[40:] = 0.0
    assert cause_of(recorded("cuda"), host_ns=_steady_host(), clocks_mhz=clocks) == "clock"


def test_what_a_clock_at_rest_is_off_by_explains_no_small_excess():
    extra, host = 100_000, _steady_host()
    found = [
        cause_of(recorded("cuda"), extra=extra, host_ns=host, clocks_mhz=_counted(clock))
        for clock in (1980 / 1.009, 1980 / 1.012)
    ]
    assert found == ["unattributed", "clock"]


def test_a_faster_clock_that_was_counted_explains_a_shorter_sample():
    found = [
        cause_of(
            recorded("cuda"), extra=-3 * MS, host_ns=_steady_host(), clocks_mhz=_counted(clock)
        )
        for clock in (2640.0, 1485.0)
    ]
    assert found == ["clock", "unattributed"]


def test_more_cycles_beside_a_new_neighbour():
    assert cause_of(_levels(others=1), host_ns=_steady_host()) == "neighbour process"


def test_a_neighbour_that_is_always_there_explains_no_single_outlier():
    recording = recorded("cuda", other_gpu_processes=(1,) * TICKS)
    assert cause_of(recording, host_ns=_steady_host()) == "unattributed"


def test_a_faster_outlier_is_put_down_to_a_faster_clock_alone():
    cap = REASON_BITS["power_cap"]
    for clock, expected in ((2640, "clock"), (1980, "unattributed"), (1485, "unattributed")):
        recording = _levels(clock=clock, mask=cap)
        found = cause_of(recording, extra=-3 * MS, at=30, host_ns=_steady_host())
        assert found == expected


def test_a_faster_outlier_on_a_cpu_has_no_cause():
    assert cause_of(recorded(**collected(START, 9 * MS)), extra=-3 * MS) == "unattributed"


def test_with_a_steady_host_the_host_is_not_the_cause():
    recording = recorded("cuda", **collected(START + MS, 4 * MS))
    assert cause_of(recording, host_ns=_steady_host()) == "unattributed"


def test_with_a_slow_host_the_device_is_not_the_cause():
    host = _steady_host()
    host[30] += 4 * MS
    assert cause_of(_levels(clock=1485), host_ns=host) == "unattributed"


def test_the_host_of_a_gpu_works_up_to_two_iterations_ahead():
    host = _steady_host()
    host[30] += 4 * MS
    found = [
        cause_of(recorded("cuda", **collected(START - ahead * MS, 3 * MS)), host_ns=host)
        for ahead in (18, 24)
    ]
    assert found == ["garbage collection", "unattributed"]


@pytest.mark.parametrize(
    ("host_ns", "ahead_ns", "cause"),
    [
        (20_000, 3_900_000, "garbage collection"),
        (20_000, 4_400_000, "unattributed"),
        (180_000, 900_000, "garbage collection"),
        (180_000, 1_500_000, "unattributed"),
    ],
)
def test_the_host_works_further_ahead_where_calls_are_short_and_cheap(host_ns, ahead_ns, cause):
    starts, durations = slowed({300: 400_000}, usual=200_000, count=1000)
    host = np.full(1000, host_ns)
    host[300] += 400_000
    recording = recorded("cuda", **collected(int(starts[300]) - ahead_ns, 250_000))
    assert attribute(starts, durations, [300], recording, host) == [cause]


def test_without_host_times_both_are_looked_at():
    assert cause_of(recorded("cuda", **collected(START + MS, 3 * MS))) == "garbage collection"
    assert cause_of(_levels(clock=1485), host_ns=[]) == "clock"
