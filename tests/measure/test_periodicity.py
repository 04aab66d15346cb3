import numpy as np
import pytest

from steadytorch.measure.periodicity import LEAST, without_lines

from .series import ar1

WHEN = np.arange(2000)


def _noise(seed, count=2000):
    return np.random.default_rng(seed).standard_normal(count)


@pytest.mark.parametrize("periods", [5.71, 20.0, 333.3])
def test_a_wave_is_taken_out(periods):
    noise = _noise(0)
    rest = without_lines(noise + 0.5 * np.sin(2 * np.pi * periods / 2000 * WHEN + 1.0))
    assert np.corrcoef(rest.series, noise)[0, 1] > 0.99
    assert rest.share == pytest.approx(1 / 1.125, rel=0.05)


def test_an_unfinished_period_shifts_the_mean_by_what_it_adds():
    wave = np.sin(2 * np.pi * 5.25 / 2000 * WHEN)
    rest = without_lines(0.1 * _noise(1) + wave)
    assert rest.shift == pytest.approx(wave.mean(), abs=0.002)


def test_several_waves_are_taken_out():
    waves = sum(np.sin(2 * np.pi * periods / 2000 * WHEN) for periods in (12.3, 77.0, 401.5))
    assert without_lines(_noise(2) + waves).share < 0.5


def test_noise_without_lines_loses_next_to_nothing():
    shares = np.array([without_lines(_noise(seed)).share for seed in range(200)])
    assert np.mean(shares < 1.0) < 0.10
    assert shares.min() > 0.97


def test_correlated_noise_loses_little():
    shares = []
    for seed in range(100):
        shares.append(without_lines(ar1(0.9, 2000, seed)).share)
    assert np.mean(np.array(shares) < 1.0) < 0.10
    assert min(shares) > 0.8


@pytest.mark.parametrize("series", [np.ones(500), np.sin(np.arange(LEAST - 1))])
def test_constant_and_short_series_have_no_lines(series):
    rest = without_lines(series)
    assert (rest.share, rest.shift) == (1.0, 0.0)
    assert rest.series == pytest.approx(series - series.mean())
