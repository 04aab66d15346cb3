import numpy as np

from steadytorch.device.recording import Recording
from steadytorch.measure.telemetry_stretches import TelemetryStretches


def _stretches(spans, count=20, **columns):
    recording = Recording(
        device="cuda", interval_ns=10, at_ns=tuple(range(0, 10 * count, 10)), **columns
    )
    return TelemetryStretches(recording, np.asarray(spans).T)


def test_spans_share_a_stretch_only_between_the_same_ticks():
    stretches = _stretches([(12, 18), (19, 22), (31, 35), (90, 99)])
    assert stretches.shares_a_stretch("wait_ns", 0).tolist() == [True, True, False, False]
    assert stretches.shares_a_stretch("wait_ns", 1).tolist() == [True, True, False, False]
    assert stretches.shares_a_stretch("wait_ns", 3).tolist() == [False, False, False, True]


def test_time_is_counted_beyond_the_median_of_free_stretches():
    rises = [3, 3, 50, 3] + [3] * 16
    stretches = _stretches([(21, 29)], wait_ns=tuple(np.cumsum([0, *rises])[:20].tolist()))
    assert stretches.extra_ns("wait_ns", 0) == 47


def test_events_are_counted_beyond_nearly_all_free_stretches():
    rises = [0, 0, 9, 0, 4] + [0] * 15
    stretches = _stretches([(21, 29)], minor_faults=tuple(np.cumsum([0, *rises])[:20].tolist()))
    assert stretches.extra_events("minor_faults", 0) == 9 - 4


def test_a_channel_that_is_read_seldom_may_show_a_rise_two_ticks_late():
    for at, shown in ((4, 7), (5, 7), (6, 0)):
        steal = (0,) * at + (7,) * (20 - at)
        assert _stretches([(21, 29)], steal_ns=steal).extra_ns("steal_ns", 0) == shown
    stretches = _stretches([(21, 29), (41, 49)])
    assert stretches.shares_a_stretch("steal_ns", 0).tolist() == [True, True]
    assert stretches.shares_a_stretch("wait_ns", 0).tolist() == [True, False]


def test_stretches_that_may_show_the_rise_of_a_span_are_not_free():
    steal = tuple(np.cumsum([0, 0, 0, 5] + [0] * 16).tolist())
    stretches = _stretches([(1, 9), (101, 109)], count=14, steal_ns=steal[:14])
    assert stretches.extra_events("steal_ns", 0) == 5


def test_a_channel_that_is_unknown_shows_nothing():
    stretches = _stretches([(21, 29)])
    assert stretches.extra_ns("wait_ns", 0) == stretches.extra_events("compilations", 0) == 0
    assert stretches.level("sm_clock_mhz", 21, 29) == (None, 0.0)
    assert stretches.bits(21, 29) == (0, 0)


def test_a_level_is_the_mean_within_or_of_the_ticks_around():
    clocks = (100,) * 5 + (80, 60) + (100,) * 13
    stretches = _stretches([(0, 1)], sm_clock_mhz=clocks)
    assert stretches.level("sm_clock_mhz", 50, 60) == (70, 100)
    assert stretches.level("sm_clock_mhz", 52, 58) == (70, 100)
    assert stretches.level("sm_clock_mhz", 52, 58, latest=True) == (60, 100)


def test_a_span_outside_the_recording_takes_its_nearest_tick():
    stretches = _stretches(
        [(-50, -40), (900, 950)], sm_clock_mhz=tuple(range(1, 21)), wait_ns=(0,) * 20
    )
    assert stretches.level("sm_clock_mhz", -50, -40)[0] == 1
    assert stretches.level("sm_clock_mhz", 900, 950)[0] == 20
    assert stretches.extra_ns("wait_ns", 0) == stretches.extra_ns("wait_ns", 1) == 0


def test_bits_are_those_seen_and_those_that_always_stand():
    stretches = _stretches([(0, 1)], clock_event_mask=(4,) * 10 + (4 | 32,) * 2 + (4,) * 8)
    assert stretches.bits(101, 109) == (4 | 32, 4)
