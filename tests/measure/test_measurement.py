import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.measure.measurement import Measurement, summarize


def test_summary_of_a_long_series_has_an_interval_and_a_tail():
    samples = (1e6 * np.random.default_rng(0).lognormal(0, 0.01, 4000)).astype(int)
    found = summarize(samples)
    assert found.median_ci_ns[0] <= found.median_ns <= found.median_ci_ns[1]
    assert found.median_ns < found.p90_ns < found.p99_ns <= found.max_ns
    assert found.p99_over_median == found.p99_ns / found.median_ns
    assert found.why_no_ci is None


def test_a_short_series_claims_neither_and_says_why():
    found = summarize([5, 6, 7])
    assert found.median_ns == 6
    assert found.median_ci_ns is None
    assert found.why_no_ci
    assert found.p99_ns is None


def test_a_constant_series_has_no_spread():
    found = summarize([1000] * 200)
    assert (found.cv, found.median_ci_ns) == (0.0, (1000.0, 1000.0))


def test_one_sample_is_a_summary_without_spread():
    assert summarize([7]).cv == 0.0


@pytest.mark.parametrize(
    "samples", [[], [[1, 2]], [1, 0], [1, -5], [1, float("nan")], [float("inf")]]
)
def test_series_that_are_no_durations_are_refused(samples):
    with pytest.raises(UsageError):
        summarize(samples)


def test_the_refusal_names_the_sample():
    with pytest.raises(UsageError, match="sample 2 is -3"):
        summarize([1, 2, -3])


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=300))
def test_no_sample_is_dropped_and_json_gives_back_the_same(samples):
    found = summarize(samples)
    assert list(found.samples_ns) == samples
    assert msgspec.json.decode(msgspec.json.encode(found), type=Measurement) == found
