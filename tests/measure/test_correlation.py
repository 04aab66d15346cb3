import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.measure import correlation as c

from .series import ar1


def test_independent_samples_are_worth_about_their_number():
    samples = np.random.default_rng(0).standard_normal(20_000)
    assert c.effective_size(samples) == pytest.approx(20_000, rel=0.15)


def test_correlated_samples_are_worth_far_fewer():
    # The indicator of a Gaussian AR(1) has autocorrelation (2/pi) asin(rho^k).
    lags = np.arange(1, 400)
    tau = 1 + 2 * np.sum(2 / np.pi * np.arcsin(0.9**lags))
    measured = 20_000 / c.effective_size(ar1(0.9, 20_000, 1))
    assert measured == pytest.approx(tau, rel=0.25)


@pytest.mark.parametrize("series", [np.ones(100), np.array([1.0]), np.array([1.0, 2.0, 3.0])])
def test_constant_and_tiny_series_have_no_correlation(series):
    assert c.autocorrelation_time(series) == 1.0


def test_worth_by_ranks_agrees_with_theory_and_scatters_little():
    lags = np.arange(1, 400)
    tau = 1 + 2 * np.sum(2 / np.pi * np.arcsin(0.9**lags))
    worth = [2000 / c.rank_effective_size(ar1(0.9, 2000, seed)) for seed in range(50)]
    assert np.mean(worth) == pytest.approx(tau, rel=0.1)
    assert np.std(worth) < 0.3 * tau


def test_worth_by_ranks_is_blind_to_scale_and_ties():
    samples = np.random.default_rng(0).standard_normal(500)
    assert c.rank_effective_size(np.exp(5 * samples)) == c.rank_effective_size(samples)
    assert c.rank_effective_size(np.round(samples)) > 300
    assert c.rank_effective_size(np.ones(80)) == 80


def test_corrected_size_is_below_the_plain_one_under_correlation():
    sizes = [
        (c.corrected_size(x, 0.5), c.effective_size(x))
        for x in (ar1(0.9, 1000, seed) for seed in range(20))
    ]
    assert np.median([a / b for a, b in sizes]) < 0.9


def _with_bursts(starts, length=25, count=2000):
    samples = np.random.default_rng(0).normal(100.0, 1.0, count)
    for start in starts:
        samples[start : start + length] += 20.0
    return samples


def test_bursts_count_for_more_the_fewer_they_are():
    """The same time in bursts: two events are less certain than eight."""
    few = c.corrected_size(_with_bursts([400, 1400], 40), 0.5)
    many = c.corrected_size(_with_bursts(range(100, 2000, 240), 10), 0.5)
    assert few < 0.8 * many


def test_single_outliers_hardly_count():
    plain = c.corrected_size(_with_bursts([]), 0.5)
    assert c.corrected_size(_with_bursts(range(50, 2000, 100), 1), 0.5) > 0.9 * plain


def test_noise_on_top_does_not_hide_slow_correlation():
    """Adjacent samples are hardly correlated, but blocks are."""
    slow, fast = ar1(0.97, 4000, 2), np.random.default_rng(3).standard_normal(4000)
    mixed = slow + fast
    assert c.rank_effective_size(mixed) > 1000
    assert c.claimable_size(mixed, 0.5) < 300


def test_clustered_extremes_are_worth_fewer():
    rng = np.random.default_rng(4)
    single, clustered = (rng.standard_normal(10_000) for _ in range(2))
    single[::97] += 20.0
    for start in range(0, 10_000, 970):
        clustered[start : start + 10] += 20.0
    assert c.claimable_size(single, 0.99) > 5 * c.claimable_size(clustered, 0.99)


def test_a_periodic_disturbance_leaves_the_worth_as_it_was():
    """A window of lags would end inside a period and be wrong either way."""
    noise = np.random.default_rng(5).standard_normal(7000)
    wave = 0.8 * np.sin(2 * np.pi * np.arange(7000) / 350)
    assert c.corrected_size(noise + wave, 0.5) > 0.6 * c.corrected_size(noise, 0.5)


def test_alternation_is_not_believed_beyond_tenfold():
    assert c.corrected_size(np.tile([1.0, 2.0], 500), 0.5) <= 10_000


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=400), st.floats(0.001, 0.999))
def test_any_series_has_a_positive_finite_worth(values, quantile):
    samples = np.array(values)
    for size in (c.corrected_size(samples, quantile), c.claimable_size(samples, quantile)):
        assert 0 < size < np.inf
