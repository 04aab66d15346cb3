from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.finding import Case
from steadytorch.findings.samples import samples_of, unrecorded
from steadytorch.measure.causes import GARBAGE_COLLECTION

from .cases import MS, TICK, never, noise, steadily, timed


def test_a_case_without_samples_has_none():
    assert samples_of(Case()) is None


def test_outliers_come_with_the_cause_that_was_recorded():
    times = noise(400)
    times[200] += 40 * MS
    at = int(times[:200].sum())
    samples = samples_of(timed(times, gc=[(at, 40 * MS)]))
    assert samples is not None
    place = samples.caused_by(GARBAGE_COLLECTION)
    assert len(place) == 1
    assert abs(samples.durations_ns[place[0]] - times[200]) < 1
    assert samples.variance_share(place) > 0.9
    assert abs(samples.excess_ns(place) * samples.steps - 40 * MS) < MS


def test_a_counter_is_read_over_the_steady_part_alone():
    """A counter that only rises during warm-up is excluded."""
    times = np.concatenate([noise(100, 30 * MS), noise(900)])
    warm_up = int(times[:100].sum())
    rises = timed(times, compilations=lambda at: np.minimum(at, warm_up) // MS)
    samples = samples_of(rises)
    assert samples is not None
    assert samples.elapsed_ns < times[90:].sum()
    assert samples.rise("compilations") <= warm_up // MS * 0.1 + TICK // MS


def test_a_rate_is_of_the_time_that_the_counter_was_read_over():
    """Ticks far outside the samples also count events there."""
    samples = samples_of(timed([MS] * 60, wait_ns=steadily(900_000_000)))
    assert samples is not None
    far = (-500 * MS, 700 * MS)
    spread = msgspec.structs.replace(samples.recording, at_ns=far, wait_ns=(0, 600 * MS))
    assert replace(samples, recording=spread).rate("wait_ns") == pytest.approx(0.5)
    assert samples.rate("wait_ns") == pytest.approx(0.9, rel=0.05)
    assert samples.rate("steal_ns") is None


def test_a_level_is_that_of_the_latest_tick():
    samples = samples_of(timed([10 * MS] * 60, sm_clock_mhz=lambda at: 1000 + at // TICK))
    assert samples is not None
    levels = samples.level("sm_clock_mhz")
    ends = samples.starts_ns + samples.durations_ns.astype(int)
    np.testing.assert_array_equal(levels, 1000 + ends // TICK)


def test_a_gpu_bound_host_is_told_from_one_that_holds_the_step_up():
    times = noise(200)
    ahead, behind = (timed(times, host_ns=share * times) for share in (0.3, 0.95))
    assert not samples_of(ahead).host_bound
    assert samples_of(behind).host_bound
    assert samples_of(timed(times)).host_bound


def test_what_was_not_recorded_is_told_with_its_reason():
    samples = samples_of(timed(noise(50), unknown={"wait_ns": "schedstats are off"}))
    said = unrecorded("cpu-contention", samples, "wait_ns", "time waiting for a core")
    assert "schedstats are off" in said.why
    assert said.recapture


@given(st.lists(st.integers(100_000, 50 * MS), min_size=5, max_size=60), st.integers(0, 10_000))
def test_every_rise_of_a_counter_is_counted_at_most_once(times, per_second):
    samples = samples_of(timed(times, wait_ns=steadily(per_second), minor_faults=never))
    assert samples is not None
    total = samples.recording.wait_ns[-1]
    assert 0 <= samples.rise("wait_ns") <= total
    assert samples.rise("minor_faults") == 0
    assert samples.rise("major_faults") is None
