import numpy as np
import pytest
from scipy.signal import lfilter

from steadytorch.measure.variability import describe_variability, find_outliers


def _block(samples):
    return describe_variability(
        np.asarray(samples, dtype=float), p99_over_median=None, regimes=1, outliers=0
    )


def test_normal_samples_have_one_spread_by_all_measures():
    found = _block(1e6 * (1 + 0.02 * np.random.default_rng(0).standard_normal(20_000)))
    assert found.cv == pytest.approx(0.02, rel=0.03)
    assert found.robust_cv == pytest.approx(0.02, rel=0.03)
    assert found.iqr_over_median == pytest.approx(1.349 * 0.02, rel=0.03)
    # The median of |x - y| for independent normal x and y is 0.9539 standard deviations.
    assert found.jitter == pytest.approx(0.954 * 0.02, rel=0.05)
    assert found.von_neumann == pytest.approx(2.0, rel=0.05)


def test_a_wild_sample_moves_the_cv_and_not_the_robust_one():
    samples = 1e6 * (1 + 0.01 * np.random.default_rng(0).standard_normal(1000))
    quiet = _block(samples)
    samples[500] *= 50
    wild = _block(samples)
    assert wild.cv > 50 * quiet.cv
    assert wild.robust_cv == pytest.approx(quiet.robust_cv, rel=0.02)


def test_correlation_lowers_the_von_neumann_ratio():
    shocks = np.random.default_rng(0).standard_normal(20_000)
    found = _block(1e6 + 1e3 * lfilter([1.0], [1.0, -0.9], shocks))
    assert found.von_neumann == pytest.approx(2 * (1 - 0.9), rel=0.2)


@pytest.mark.parametrize("count", [600, 60_000])
def test_drift_is_percent_of_the_median_per_minute(count):
    # Samples that last 1 % longer at the end of one minute than at its beginning.
    samples = 60e9 / count * np.linspace(0.995, 1.005, count)
    assert _block(samples).drift_percent_per_minute == pytest.approx(1.0, rel=0.01)


def test_one_sample_does_not_vary():
    found = _block([7.0])
    assert (found.cv, found.robust_cv, found.jitter) == (0.0, 0.0, 0.0)
    assert found.von_neumann is None
    assert found.drift_percent_per_minute is None


def test_outliers_are_counted_in_thousandths():
    found = describe_variability(np.ones(500), p99_over_median=1.1, regimes=2, outliers=2)
    assert (found.outliers_per_1000, found.p99_over_median, found.regimes) == (4.0, 1.1, 2)


def test_outliers_are_found_on_both_sides_with_their_values():
    samples = np.round(1e6 * np.exp(0.01 * np.random.default_rng(0).standard_normal(1000)))
    samples[[100, 700]] = 1_500_000, 600_000
    found = find_outliers(samples)
    assert [(o.index, o.sample_ns, o.cause) for o in found] == [
        (100, 1_500_000, "unattributed"),
        (700, 600_000, "unattributed"),
    ]


def test_normal_noise_has_hardly_any_outliers():
    samples = np.exp(0.01 * np.random.default_rng(1).standard_normal(100_000))
    assert len(find_outliers(1e6 * samples)) <= 2


def test_the_warm_up_has_no_outliers_and_places_are_those_of_the_whole_series():
    samples = np.r_[np.full(10, 9e6), np.full(90, 1e6)]
    samples[50] = 2e6
    assert [o.index for o in find_outliers(samples, start=10)] == [50]


def test_differences_that_matter_to_no_one_are_no_outliers():
    samples = np.full(100, 1_000_000.0)
    samples[3], samples[4] = 1_004_000, 1_006_000
    assert [o.index for o in find_outliers(samples)] == [4]


def test_causes_that_are_known_are_told():
    samples = np.r_[np.full(50, 1e6), 5e6, np.full(50, 1e6)]
    (found,) = find_outliers(samples, causes={50: "garbage collection"})
    assert found.cause == "garbage collection"
