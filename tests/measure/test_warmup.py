import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.measure.warmup import (
    LEAST_BLOCKS,
    change_points,
    noise_scale,
    slope,
    steady_part,
)


def _noise(count, spread=0.01, seed=0):
    return np.exp(spread * np.random.default_rng(seed).standard_normal(count))


def test_a_quiet_series_is_steady_from_its_first_sample():
    verdict = steady_part(1e6 * _noise(1000))
    assert (verdict.dropped, verdict.steady, verdict.regimes, verdict.note) == (0, True, 1, None)


@pytest.mark.parametrize("length", [1000, 30_000])
def test_a_slow_beginning_is_dropped_to_within_a_block(length):
    samples = 1e6 * _noise(length)
    slow = length // 10
    samples[:slow] *= 1.2
    verdict = steady_part(samples)
    assert verdict.steady
    assert slow <= verdict.dropped <= slow + length // 100


def test_a_gradual_beginning_leaves_no_bias_that_matters():
    off = []
    for seed in range(40):
        samples = _noise(2000, seed=seed) * (1 + 0.1 * np.exp(-np.arange(2000) / 100))
        off.append(abs(np.median(samples[steady_part(samples).dropped :]) - 1))
    assert np.quantile(off, 0.95) <= 0.003


def test_a_level_that_comes_back_is_a_state_and_nothing_is_dropped():
    states = np.repeat([1.05, 1.0, 1.05, 1.0], 250)
    verdict = steady_part(states * _noise(1000))
    assert (verdict.dropped, verdict.steady, verdict.regimes) == (0, False, 2)
    assert verdict.note is not None
    assert "no steady state" in verdict.note


def test_warm_up_before_several_states_is_still_dropped():
    levels = np.repeat([1.5, 1.0, 1.05, 1.0, 1.05, 1.0], 200)
    verdict = steady_part(levels * _noise(1200))
    assert (verdict.dropped, verdict.steady) == (200, False)


def test_a_short_burst_is_no_state():
    samples = _noise(2000)
    samples[900:940] *= 1.2
    verdict = steady_part(samples)
    assert (verdict.dropped, verdict.steady, verdict.regimes) == (0, True, 1)


def test_a_burst_at_the_end_does_not_make_the_rest_a_warm_up():
    samples = _noise(2000)
    samples[-30:] *= 1.3
    assert steady_part(samples).dropped == 0
    assert steady_part(samples).steady


@pytest.mark.parametrize("total", [0.03, -0.03])
def test_a_drift_through_the_whole_series_is_not_steady_and_drops_nothing(total):
    samples = _noise(2000) * np.linspace(1, 1 + total, 2000)
    verdict = steady_part(samples)
    assert (verdict.dropped, verdict.steady) == (0, False)


def test_a_change_in_the_second_half_is_not_settled():
    samples = _noise(1000)
    samples[:700] *= 1.1
    verdict = steady_part(samples)
    assert (verdict.dropped, verdict.steady) == (0, False)
    assert "not settled" in str(verdict.note)


def test_correlated_noise_is_not_mistaken_for_states():
    from scipy.signal import lfilter

    shocks = np.random.default_rng(4).standard_normal((30, 2000)) * np.sqrt(1 - 0.9**2)
    lines = np.exp(0.01 * lfilter([1.0], [1.0, -0.9], shocks, axis=1))
    assert sum(steady_part(line).steady for line in lines) >= 29


@pytest.mark.parametrize("count", [1, 2, 49])
def test_a_few_samples_show_nothing(count):
    verdict = steady_part(np.full(count, 5.0))
    assert (verdict.dropped, verdict.steady, verdict.regimes) == (0, False, 1)
    assert verdict.note == f"too few samples to judge ({count} of 50 needed)"


def test_a_constant_series_is_steady():
    assert steady_part(np.full(50, 1000.0)).steady


def test_a_step_between_constants_is_warm_up():
    verdict = steady_part(np.repeat([2000.0, 1000.0], [100, 900]))
    assert (verdict.dropped, verdict.steady) == (100, True)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200))
def test_any_series_gets_a_verdict_that_keeps_half(values):
    verdict = steady_part(np.array(values, dtype=float))
    assert 0 <= verdict.dropped <= len(values) / 2
    assert verdict.steady == (verdict.note is None)
    assert (verdict.regimes == 1) or not verdict.steady


def test_change_points_end_with_the_series():
    levels = np.repeat([0.0, 0.2], [40, 60])
    series = levels + 0.01 * np.random.default_rng(0).standard_normal(100)
    assert change_points(series) == [40, 100]


def test_scale_is_that_of_the_noise_and_not_of_the_steps():
    series = 0.01 * np.random.default_rng(0).standard_normal(4000)
    stepped = series + np.repeat([0.0, 0.3, 0.1, 0.5], 1000)
    assert noise_scale(stepped) == pytest.approx(0.01, rel=0.15)


def test_scale_grows_with_correlation():
    from scipy.signal import lfilter

    shocks = 0.01 * np.random.default_rng(1).standard_normal(20_000)
    # The long-run standard deviation of an AR(1) is that of its shocks over 1 - rho.
    assert noise_scale(lfilter([1.0], [1.0, -0.6], shocks)) == pytest.approx(0.025, rel=0.2)


@pytest.mark.parametrize("count", [2, 50, 5000])
def test_slope_of_a_line_with_a_wild_point(count):
    values = 3.0 * np.arange(count, dtype=float)
    if count > 2:
        values[7] = 1e9
    assert slope(values) == pytest.approx(3.0)


def test_least_number_of_samples_is_that_of_an_interval():
    from steadytorch.measure.statistics import MIN_EFFECTIVE
    from steadytorch.measure.warmup import BLOCK

    assert LEAST_BLOCKS * BLOCK == MIN_EFFECTIVE
