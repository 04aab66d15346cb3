from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.device.recorder import Recorder
from steadytorch.device.recording import COUNTERS, LEVELS, REASON_BITS, Recording
from steadytorch.errors import UsageError
from steadytorch.measure.causes import CAUSES, attribute

MS = 1_000_000
TICK = 15 * MS
TICKS = 80
BEGAN = 10**15  # nanoseconds since boot: an origin that floats could not tell from its neighbours


def _rise(at_tick, amount, *, each=0):
    """A counter that rises by `each` at every tick, and by `amount` more within one."""
    column = np.arange(TICKS) * each
    column[at_tick + 1 :] += amount
    return tuple(column.tolist())


def _recording(device="cpu", **columns):
    at = tuple(BEGAN + TICK * np.arange(TICKS))
    return Recording(device=device, interval_ns=TICK, at_ns=tuple(map(int, at)), **columns)


def _series(slow, *, usual=10 * MS, count=100):
    """Starts and durations of `count` iterations; `slow` is index to what comes on top."""
    durations = np.full(count, usual)
    for index, extra in slow.items():
        durations[index] += extra
    starts = BEGAN + 2 * MS + np.concatenate([[0], np.cumsum(durations)[:-1]])
    return starts, durations


def _tick_of(start):
    return int((start - BEGAN) // TICK)


def _one(recording, extra=4 * MS, at=30, **keywords):
    starts, durations = _series({at: extra})
    return attribute(starts, durations, [at], recording, **keywords)[0]


STARTS, _ = _series({30: 4 * MS})
START = int(STARTS[30])
THEN = _tick_of(START)


def _collected(start, duration):
    return {"gc_start_ns": (start,), "gc_duration_ns": (duration,), "gc_generation": (2,)}


def test_a_collection_that_explains_half_the_excess_is_the_cause():
    assert _one(_recording(**_collected(START + MS, 2 * MS))) == "garbage collection"


def test_a_collection_that_explains_less_is_not():
    assert _one(_recording(**_collected(START + MS, 2 * MS - 1))) == "unattributed"


def test_only_what_overlaps_the_iteration_counts():
    assert _one(_recording(**_collected(START - 3 * MS, 4 * MS))) == "unattributed"


def test_several_short_collections_add_up():
    recording = _recording(
        gc_start_ns=(START + MS, START + 5 * MS),
        gc_duration_ns=(MS, MS),
        gc_generation=(0, 0),
    )
    assert _one(recording) == "garbage collection"


def test_time_without_a_core_is_a_context_switch():
    assert _one(_recording(wait_ns=_rise(THEN, 2 * MS))) == "context switch"


def test_time_without_a_core_elsewhere_is_not():
    assert _one(_recording(wait_ns=_rise(THEN + 5, 4 * MS))) == "unattributed"


def test_time_without_a_core_that_is_usual_is_not():
    assert _one(_recording(wait_ns=_rise(THEN, 0, each=3 * MS))) == "unattributed"


def test_an_involuntary_switch_of_any_thread_explains_a_cpu_workload():
    assert _one(_recording(involuntary_switches=_rise(THEN, 1, each=2))) == "context switch"


def test_switches_that_happen_all_the_time_explain_nothing():
    assert _one(_recording(involuntary_switches=_rise(THEN, 0, each=2))) == "unattributed"


def test_one_switch_does_not_explain_a_second():
    column = _rise(THEN, 1)
    assert _one(_recording(involuntary_switches=column), extra=500 * MS) == "unattributed"


def test_beside_a_gpu_the_wait_of_the_measured_thread_decides():
    switches = _rise(THEN, 1)
    silent = _recording("cuda", involuntary_switches=switches, wait_ns=_rise(THEN, 0))
    unknown = _recording("cuda", involuntary_switches=switches)
    assert _one(silent) == "unattributed"
    assert _one(unknown) == "context switch"


def test_faults_that_take_the_time_are_the_cause():
    assert _one(_recording(minor_faults=_rise(THEN, 4000, each=7))) == "page fault"
    assert _one(_recording(major_faults=_rise(THEN, 40))) == "page fault"


def test_a_few_faults_are_not():
    assert _one(_recording(minor_faults=_rise(THEN, 400))) == "unattributed"


def test_stolen_time_is_the_cause_of_a_stall_as_long():
    recording = _recording(steal_ns=_rise(THEN, 10 * MS))
    assert _one(recording, extra=12 * MS) == "cpu steal"


def test_a_step_of_the_steal_counter_says_nothing_of_short_stalls():
    assert _one(_recording(steal_ns=_rise(THEN, 10 * MS)), extra=4 * MS) == "unattributed"


def test_the_cause_that_explains_the_most_is_named():
    recording = _recording(steal_ns=_rise(THEN, 10 * MS), wait_ns=_rise(THEN, 7 * MS))
    assert _one(recording, extra=12 * MS) == "cpu steal"


def test_a_recompilation_comes_before_the_collections_it_brings_about():
    recording = _recording(
        compilations=_rise(THEN, 1), **_collected(START + MS, 15 * MS), wait_ns=_rise(THEN, 9 * MS)
    )
    assert _one(recording, extra=30 * MS) == "recompilation"


def test_a_stall_too_short_for_a_compilation_is_none():
    assert _one(_recording(compilations=_rise(THEN, 1)), extra=MS) == "unattributed"


@pytest.mark.parametrize("channel", ["allocator_retries", "allocator_device_calls"])
def test_calls_of_the_allocator_into_the_driver_are_the_cause(channel):
    assert _one(_recording("cuda", **{channel: _rise(THEN, 2)})) == "allocator"


def test_one_event_explains_only_the_larger_of_two_outliers():
    starts, durations = _series({30: 30 * MS, 31: 5 * MS})
    recording = _recording(compilations=_rise(_tick_of(starts[30]) + 1, 1))
    assert attribute(starts, durations, [30, 31], recording) == ["recompilation", "unattributed"]
    assert attribute(starts, durations, [31, 30], recording) == ["unattributed", "recompilation"]


def test_two_events_explain_two_equal_outliers():
    starts, durations = _series({30: 4 * MS, 31: 4 * MS}, usual=5 * MS)
    stretch = _tick_of(starts[30])
    assert _tick_of(starts[31]) <= stretch + 1
    recording = _recording("cuda", allocator_device_calls=_rise(stretch, 2))
    assert attribute(starts, durations, [30, 31], recording) == ["allocator"] * 2


def test_waiting_is_spent_once():
    starts, durations = _series({30: 4 * MS, 31: 3 * MS}, usual=2 * MS)
    stretch = _tick_of(starts[30])
    recording = _recording(wait_ns=_rise(stretch, 3 * MS))
    assert attribute(starts, durations, [30, 31], recording) == ["context switch", "unattributed"]


def test_an_outlier_with_an_exact_cause_leaves_the_samples_to_the_others():
    starts, durations = _series({30: 4 * MS, 31: 3 * MS}, usual=2 * MS)
    stretch = _tick_of(starts[30])
    recording = _recording(
        wait_ns=_rise(stretch, 3 * MS), **_collected(int(starts[30]) + MS, 4 * MS)
    )
    found = attribute(starts, durations, [30, 31], recording)
    assert found == ["garbage collection", "context switch"]


def test_stretches_with_outliers_do_not_make_events_usual():
    slow = dict.fromkeys(range(5, 100, 9), 4 * MS)
    starts, durations = _series(slow)
    column = np.zeros(TICKS, dtype=int)
    for index in slow:
        column[_tick_of(starts[index]) + 1 :] += 1
    recording = _recording(involuntary_switches=tuple(column.tolist()))
    found = attribute(starts, durations, list(slow), recording)
    assert found == ["context switch"] * len(slow)


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
    return _recording(device, **columns)


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
    assert _one(recording, host_ns=_steady_host()) == cause


def test_heat_comes_before_power():
    mask = REASON_BITS["power_cap"] | REASON_BITS["thermal_slowdown"]
    assert _one(_levels(clock=1485, mask=mask), host_ns=_steady_host()) == "thermal"


def test_a_reason_without_a_fall_of_the_clock_explains_nothing():
    recording = _levels(mask=REASON_BITS["power_cap"])
    assert _one(recording, host_ns=_steady_host()) == "unattributed"


def test_a_small_fall_of_the_clock_explains_no_large_excess():
    recording = _levels(clock=1940, mask=REASON_BITS["power_cap"])
    assert _one(recording, host_ns=_steady_host()) == "unattributed"


def test_where_the_clock_is_unknown_a_new_reason_counts_and_a_standing_one_does_not():
    cap = REASON_BITS["power_cap"]
    new = tuple(cap if tick in (THEN, THEN + 1) else 0 for tick in range(TICKS))
    found = [
        _one(_recording("cuda", clock_event_mask=mask), host_ns=_steady_host())
        for mask in (new, (cap,) * TICKS)
    ]
    assert found == ["power cap", "unattributed"]


def test_more_cycles_beside_a_new_neighbour():
    assert _one(_levels(others=1), host_ns=_steady_host()) == "neighbour process"


def test_a_neighbour_that_is_always_there_explains_no_single_outlier():
    recording = _recording("cuda", other_gpu_processes=(1,) * TICKS)
    assert _one(recording, host_ns=_steady_host()) == "unattributed"


def test_a_faster_outlier_is_put_down_to_a_faster_clock_alone():
    cap = REASON_BITS["power_cap"]
    for clock, expected in ((2640, "clock"), (1980, "unattributed"), (1485, "unattributed")):
        recording = _levels(clock=clock, mask=cap)
        found = _one(recording, extra=-3 * MS, at=30, host_ns=_steady_host())
        assert found == expected


def test_a_faster_outlier_on_a_cpu_has_no_cause():
    assert _one(_recording(**_collected(START, 9 * MS)), extra=-3 * MS) == "unattributed"


def test_with_a_steady_host_the_host_is_not_the_cause():
    recording = _recording("cuda", **_collected(START + MS, 4 * MS))
    assert _one(recording, host_ns=_steady_host()) == "unattributed"


def test_with_a_slow_host_the_device_is_not_the_cause():
    host = _steady_host()
    host[30] += 4 * MS
    assert _one(_levels(clock=1485), host_ns=host) == "unattributed"


def test_the_host_of_a_gpu_works_up_to_two_iterations_ahead():
    host = _steady_host()
    host[30] += 4 * MS
    found = [
        _one(_recording("cuda", **_collected(START - ahead * MS, 3 * MS)), host_ns=host)
        for ahead in (18, 24)
    ]
    assert found == ["garbage collection", "unattributed"]


def test_without_host_times_both_are_looked_at():
    assert _one(_recording("cuda", **_collected(START + MS, 3 * MS))) == "garbage collection"
    assert _one(_levels(clock=1485), host_ns=[]) == "clock"


def test_a_sample_of_a_group_spans_all_of_it():
    starts = BEGAN + 2 * MS + 10 * MS * np.arange(100)
    means = np.full(100, MS)
    means[30] += MS // 10
    late = int(starts[30]) + 9 * MS
    recording = _recording(**_collected(late, MS // 2))
    assert attribute(starts, means, [30], recording, group=10) == ["garbage collection"]
    assert attribute(starts, means, [30], recording) == ["unattributed"]


def test_a_recording_without_ticks_attributes_only_collections():
    starts, durations = _series({30: 4 * MS})
    empty = Recording(device="cuda", interval_ns=TICK, **_collected(START, 4 * MS))
    assert attribute(starts, durations, [30, 31], empty) == ["garbage collection", "unattributed"]


def test_too_few_stretches_to_compare_with_attribute_nothing():
    starts, durations = _series({1: 4 * MS}, count=4)
    recording = Recording(
        device="cpu",
        interval_ns=TICK,
        at_ns=tuple(BEGAN + TICK * tick for tick in range(4)),
        wait_ns=(0, 4 * MS, 4 * MS, 4 * MS),
    )
    assert attribute(starts, durations, [1], recording) == ["unattributed"]


def test_no_outliers_have_no_causes():
    assert attribute([], [], [], _recording()) == []


@pytest.mark.parametrize(
    ("starts", "durations", "chosen", "host"),
    [
        ([0], [1, 2], [0], None),
        ([0, 1], [1, 2], [0], [1]),
        ([0, 1], [1, 2], [2], None),
        ([0, 1], [1, 2], [-1], None),
    ],
)
def test_series_that_do_not_fit_are_misuse(starts, durations, chosen, host):
    with pytest.raises(UsageError, match="attribute"):
        attribute(starts, durations, chosen, _recording(), host)


_columns = st.none() | st.lists(st.integers(0, 10**10), min_size=12, max_size=12).map(tuple)


@given(
    device=st.sampled_from(["cpu", "cuda"]),
    columns=st.fixed_dictionaries({name: _columns for name in (*COUNTERS, *LEVELS)}),
    gaps=st.lists(st.integers(0, 10**8), min_size=12, max_size=12),
    durations=st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    with_host=st.booleans(),
)
def test_any_recording_gives_each_outlier_one_of_the_causes(
    device, columns, gaps, durations, with_host
):
    recording = Recording(
        device=device, interval_ns=1, at_ns=tuple(np.cumsum(gaps).tolist()), **columns
    )
    starts = np.cumsum([0, *durations[:-1]])
    host = durations[::-1] if with_host else None
    found = attribute(starts, durations, range(len(durations)), recording, host)
    assert len(found) == len(durations)
    assert set(found) <= set(CAUSES) - {"garbage collection"}


def test_a_real_collection_is_found_in_a_real_recording():
    garbage = [[] for _ in range(200_000)]
    with Recorder("cpu", 3600.0) as recorder:
        gc.collect()
    del garbage
    seen = recorder.recording
    start, took = seen.gc_start_ns[-1], seen.gc_duration_ns[-1]
    # Nine iterations without work, and one that holds the collection, laid around it.
    durations = [took] * 9 + [2 * took]
    starts = [start - took // 2 + took * (place - 9) for place in range(10)]
    assert attribute(starts, durations, [9], seen) == ["garbage collection"]
