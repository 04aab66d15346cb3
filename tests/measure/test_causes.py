from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.device.recorder import Recorder
from steadytorch.device.recording import COUNTERS, LEVELS, Recording
from steadytorch.errors import UsageError
from steadytorch.measure.causes import CAUSES, attribute

from .slowed import (
    BEGAN,
    MS,
    START,
    THEN,
    TICK,
    TICKS,
    cause_of,
    collected,
    recorded,
    rise,
    slowed,
    tick_of,
)


def test_a_collection_that_explains_half_the_excess_is_the_cause():
    assert cause_of(recorded(**collected(START + MS, 2 * MS))) == "garbage collection"


def test_a_collection_that_explains_less_is_not():
    assert cause_of(recorded(**collected(START + MS, 2 * MS - 1))) == "unattributed"


def test_only_what_overlaps_the_iteration_counts():
    assert cause_of(recorded(**collected(START - 3 * MS, 4 * MS))) == "unattributed"


def test_several_short_collections_add_up():
    recording = recorded(
        gc_start_ns=(START + MS, START + 5 * MS),
        gc_duration_ns=(MS, MS),
        gc_generation=(0, 0),
    )
    assert cause_of(recording) == "garbage collection"


def test_time_without_a_core_is_a_context_switch():
    assert cause_of(recorded(wait_ns=rise(THEN, 2 * MS))) == "context switch"


def test_time_without_a_core_elsewhere_is_not():
    assert cause_of(recorded(wait_ns=rise(THEN + 5, 4 * MS))) == "unattributed"


def test_time_without_a_core_that_is_usual_is_not():
    assert cause_of(recorded(wait_ns=rise(THEN, 0, each=3 * MS))) == "unattributed"


def test_an_involuntary_switch_of_any_thread_explains_a_cpu_workload():
    assert cause_of(recorded(involuntary_switches=rise(THEN, 1, each=2))) == "context switch"


def test_switches_that_happen_all_the_time_explain_nothing():
    assert cause_of(recorded(involuntary_switches=rise(THEN, 0, each=2))) == "unattributed"


def test_one_switch_does_not_explain_a_second():
    column = rise(THEN, 1)
    assert cause_of(recorded(involuntary_switches=column), extra=500 * MS) == "unattributed"


def test_beside_a_gpu_the_wait_of_the_measured_thread_decides():
    switches = rise(THEN, 1)
    silent = recorded("cuda", involuntary_switches=switches, wait_ns=rise(THEN, 0))
    unknown = recorded("cuda", involuntary_switches=switches)
    assert cause_of(silent) == "unattributed"
    assert cause_of(unknown) == "context switch"


def test_faults_that_take_the_time_are_the_cause():
    assert cause_of(recorded(minor_faults=rise(THEN, 4000, each=7))) == "page fault"
    assert cause_of(recorded(major_faults=rise(THEN, 40))) == "page fault"


def test_a_few_faults_are_not():
    assert cause_of(recorded(minor_faults=rise(THEN, 400))) == "unattributed"


def test_stolen_time_is_the_cause_of_a_stall_as_long():
    recording = recorded(steal_ns=rise(THEN, 10 * MS))
    assert cause_of(recording, extra=12 * MS) == "cpu steal"


def test_a_step_of_the_steal_counter_says_nothing_of_short_stalls():
    assert cause_of(recorded(steal_ns=rise(THEN, 10 * MS)), extra=4 * MS) == "unattributed"


def test_the_cause_that_explains_the_most_is_named():
    recording = recorded(steal_ns=rise(THEN, 10 * MS), wait_ns=rise(THEN, 7 * MS))
    assert cause_of(recording, extra=12 * MS) == "cpu steal"


def test_a_recompilation_comes_before_the_collections_it_brings_about():
    recording = recorded(
        compilations=rise(THEN, 1), **collected(START + MS, 15 * MS), wait_ns=rise(THEN, 9 * MS)
    )
    assert cause_of(recording, extra=30 * MS) == "recompilation"


def test_a_stall_too_short_for_a_compilation_is_none():
    assert cause_of(recorded(compilations=rise(THEN, 1)), extra=MS) == "unattributed"


@pytest.mark.parametrize("channel", ["allocator_retries", "allocator_device_calls"])
def test_calls_of_the_allocator_into_the_driver_are_the_cause(channel):
    assert cause_of(recorded("cuda", **{channel: rise(THEN, 2)})) == "allocator"


def test_one_event_explains_only_the_larger_of_two_outliers():
    starts, durations = slowed({30: 30 * MS, 31: 5 * MS})
    recording = recorded(compilations=rise(tick_of(starts[30]) + 1, 1))
    assert attribute(starts, durations, [30, 31], recording) == ["recompilation", "unattributed"]
    assert attribute(starts, durations, [31, 30], recording) == ["unattributed", "recompilation"]


def test_two_events_explain_two_equal_outliers():
    starts, durations = slowed({30: 4 * MS, 31: 4 * MS}, usual=5 * MS)
    stretch = tick_of(starts[30])
    assert tick_of(starts[31]) <= stretch + 1
    recording = recorded("cuda", allocator_device_calls=rise(stretch, 2))
    assert attribute(starts, durations, [30, 31], recording) == ["allocator"] * 2


def test_waiting_is_spent_once():
    starts, durations = slowed({30: 4 * MS, 31: 3 * MS}, usual=2 * MS)
    stretch = tick_of(starts[30])
    recording = recorded(wait_ns=rise(stretch, 3 * MS))
    assert attribute(starts, durations, [30, 31], recording) == ["context switch", "unattributed"]


def test_an_outlier_with_an_exact_cause_leaves_the_samples_to_the_others():
    starts, durations = slowed({30: 4 * MS, 31: 3 * MS}, usual=2 * MS)
    stretch = tick_of(starts[30])
    recording = recorded(wait_ns=rise(stretch, 3 * MS), **collected(int(starts[30]) + MS, 4 * MS))
    found = attribute(starts, durations, [30, 31], recording)
    assert found == ["garbage collection", "context switch"]


def test_stretches_with_outliers_do_not_make_events_usual():
    slow = dict.fromkeys(range(5, 100, 9), 4 * MS)
    starts, durations = slowed(slow)
    column = np.zeros(TICKS, dtype=int)
    for index in slow:
        column[tick_of(starts[index]) + 1 :] += 1
    recording = recorded(involuntary_switches=tuple(column.tolist()))
    found = attribute(starts, durations, list(slow), recording)
    assert found == ["context switch"] * len(slow)


def test_a_sample_of_a_group_spans_all_of_it():
    starts = BEGAN + 2 * MS + 10 * MS * np.arange(100)
    means = np.full(100, MS)
    means[30] += MS // 10
    late = int(starts[30]) + 9 * MS
    recording = recorded(**collected(late, MS // 2))
    assert attribute(starts, means, [30], recording, group=10) == ["garbage collection"]
    assert attribute(starts, means, [30], recording) == ["unattributed"]


def test_a_recording_without_ticks_attributes_only_collections():
    starts, durations = slowed({30: 4 * MS})
    empty = Recording(device="cuda", interval_ns=TICK, **collected(START, 4 * MS))
    assert attribute(starts, durations, [30, 31], empty) == ["garbage collection", "unattributed"]


def test_too_few_stretches_to_compare_with_attribute_nothing():
    starts, durations = slowed({1: 4 * MS}, count=4)
    recording = Recording(
        device="cpu",
        interval_ns=TICK,
        at_ns=tuple(BEGAN + TICK * tick for tick in range(4)),
        wait_ns=(0, 4 * MS, 4 * MS, 4 * MS),
    )
    assert attribute(starts, durations, [1], recording) == ["unattributed"]


def test_no_outliers_have_no_causes():
    assert attribute([], [], [], recorded()) == []


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
        attribute(starts, durations, chosen, recorded(), host)


def test_clocks_that_are_not_one_for_each_sample_are_misuse():
    with pytest.raises(UsageError, match="one clock per sample: got 1 for 2 samples"):
        attribute([0, 1], [1, 2], [1], recorded("cuda"), clocks_mhz=[1980.0])


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
    # Nine empty iterations, and one that spans the collection.
    durations = [took] * 9 + [2 * took]
    starts = [start - took // 2 + took * (place - 9) for place in range(10)]
    assert attribute(starts, durations, [9], seen) == ["garbage collection"]
