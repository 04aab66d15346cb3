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


def _series(count, seed=0, spread=0.01):
    return (1e6 * np.random.default_rng(seed).lognormal(0, spread, count)).astype(int)


def test_the_summary_is_of_what_follows_the_warm_up():
    samples = _series(1000)
    samples[:100] *= 2
    found = summarize(samples)
    assert (found.warmup_dropped, found.steady, found.why_unsteady) == (100, True, None)
    assert found.max_ns < 1.2e6
    assert found.mean_ns == pytest.approx(samples[100:].mean())
    assert found.variability.cv == found.cv
    assert len(found.samples_ns) == 1000


def test_no_interval_is_claimed_without_a_steady_state_and_it_is_said_why():
    samples = _series(1000) * np.repeat([100, 110, 100, 110], 250) // 100
    found = summarize(samples)
    assert (found.steady, found.median_ci_ns, found.warmup_dropped) == (False, None, 0)
    assert found.why_no_ci == found.why_unsteady
    assert found.variability.regimes == 2


def test_a_level_taken_up_shortly_before_the_end_supports_no_interval():
    early, late = _series(400) * 1.03, _series(600, seed=1)
    assert summarize([*early, *late[:300]]).median_ci_ns is None
    claimed = summarize([*early[:250], *late])
    assert claimed.warmup_dropped == pytest.approx(250, abs=20)
    assert claimed.median_ci_ns is not None
    said = summarize([*early, *late[:450]])
    assert (said.steady, said.median_ci_ns) == (True, None)
    assert "samples before the end: take more" in said.why_no_ci


def test_outliers_carry_their_causes():
    samples = _series(1000)
    samples[[300, 600]] = 5_000_000
    found = summarize(samples, causes={300: "garbage collection"})
    assert [(o.index, o.cause) for o in found.outliers] == [
        (300, "garbage collection"),
        (600, "unattributed"),
    ]
    assert found.variability.outliers_per_1000 == 2.0


def test_p99_has_an_interval_where_there_are_samples_for_it():
    found = summarize(_series(5000))
    assert found.p99_ci_ns is not None
    assert found.p99_ci_ns[0] <= found.p99_ns <= found.p99_ci_ns[1]
    assert summarize(_series(900)).p99_ci_ns is None


def test_one_sample_says_that_it_is_too_few():
    found = summarize([7])
    assert (found.median_ns, found.steady, found.median_ci_ns) == (7.0, False, None)
    assert "of 50 needed" in str(found.why_no_ci)


@pytest.mark.parametrize("samples", [["fast"], [1, None], 5, [[1], [2, 3]]])
def test_what_is_no_series_is_refused(samples):
    with pytest.raises(UsageError):
        summarize(samples)


def test_large_durations_are_kept_to_the_nanosecond():
    assert summarize([2**53 + 1, 2**53 + 3]).samples_ns == (2**53 + 1, 2**53 + 3)
