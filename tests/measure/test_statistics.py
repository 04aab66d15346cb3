import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.measure import statistics as s

from .series import ar1

finite = st.floats(-1e3, 1e3, allow_nan=False).map(lambda x: round(x, 6))


def test_interval_of_the_median_covers_at_its_nominal_rate():
    hits = 0
    for seed in range(400):
        samples = np.random.default_rng(seed).lognormal(0, 0.5, 200)
        interval, _ = s.quantile_interval(samples, 0.5)
        assert interval is not None
        hits += interval[0] <= 1.0 <= interval[1]
    assert hits / 400 >= 0.93


def test_interval_covers_under_correlation_where_the_naive_one_does_not():
    naive = ours = 0
    for seed in range(200):
        samples = ar1(0.9, 2000, seed)
        interval, _ = s.quantile_interval(samples, 0.5)
        assert interval is not None
        ours += interval[0] <= 0 <= interval[1]
        half = 1.96 * 1.2533 * samples.std() / np.sqrt(len(samples))
        naive += abs(np.median(samples)) <= half
    assert naive / 200 < 0.6
    assert ours / 200 >= 0.90


@pytest.mark.parametrize(
    ("count", "quantile", "words"),
    [
        (0, 0.5, "no samples"),
        (30, 0.5, "of 50 needed"),
        (1, 0.5, "too few samples (1 effective of 50 needed): take more"),
        (400, 0.99, "of 1000 needed"),
    ],
)
def test_no_interval_is_claimed_without_enough_samples(count, quantile, words):
    samples = np.random.default_rng(0).standard_normal(count)
    interval, why = s.quantile_interval(samples, quantile)
    assert interval is None
    assert why is not None
    assert words in why


@given(st.lists(finite, min_size=1, max_size=30))
def test_hodges_lehmann_lies_between_the_extremes(values):
    centre = s.hodges_lehmann(np.array(values))
    assert min(values) <= centre <= max(values)


@given(st.lists(finite, min_size=10, max_size=30), finite)
def test_signed_rank_interval_moves_with_the_data(values, shift):
    data = np.array(values)
    low, high = s.signed_rank_interval(data, 0.05)
    moved = s.signed_rank_interval(data + shift, 0.05)
    assert moved == pytest.approx((low + shift, high + shift), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_signed_rank_distribution_matches_enumeration(count):
    sums = [
        sum(r for r, sign in zip(range(1, count + 1), signs, strict=True) if sign)
        for signs in itertools.product([0, 1], repeat=count)
    ]
    top = count * (count + 1) // 2
    expected = [sum(x <= w for x in sums) / 2**count for w in range(top + 1)]
    assert s.signed_rank_cdf(count) == pytest.approx(expected)


def test_signed_rank_interval_agrees_with_the_exact_test():
    from scipy.stats import wilcoxon

    data = np.random.default_rng(5).standard_normal(20) + 0.3
    alpha = 0.05
    low, high = s.signed_rank_interval(data, alpha)
    for shift, inside in (
        (low + 1e-9, True),
        (low - 1e-9, False),
        (high - 1e-9, True),
        (high + 1e-9, False),
    ):
        p = wilcoxon(data - shift, method="exact").pvalue
        assert bool(p > alpha) is inside


def test_too_few_pairs_support_no_interval():
    assert s.signed_rank_interval(np.arange(9.0), 0.002) is None
    assert s.signed_rank_interval(np.arange(10.0), 0.002) is not None
    assert s.minimal_pairs(0.002) == 10
    assert s.signed_rank_interval(np.array([]), 0.05) is None


@pytest.mark.parametrize("count", [60, 117, 400, 3001])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.25])
@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_ranks_of_independent_samples_are_the_exact_binomial_ones(count, quantile, confidence):
    from scipy.stats import binom

    tail = (1 - confidence) / 2
    lower, upper = s.interval_ranks(count, count, quantile, confidence)
    # P(x_(r) > Q) = P(Bin < r): within the tail at `lower`, beyond it one rank further in.
    assert binom.cdf(lower - 1, count, quantile) <= tail < binom.cdf(lower, count, quantile)
    assert binom.sf(upper - 1, count, quantile) <= tail < binom.sf(upper - 2, count, quantile)


def test_fewer_effective_samples_give_wider_ranks():
    wide, narrow = (s.interval_ranks(1000, size, 0.5) for size in (100, 1000))
    assert wide[0] < narrow[0]
    assert narrow[1] < wide[1]
    # At n = 100 the lower rank lies between 40 and 41; carried to N = 1000 at the same level.
    assert 40 * 1001 / 101 - 1 <= wide[0] < 41 * 1001 / 101
    assert wide[0] + wide[1] == 1001


def test_no_ranks_exist_for_a_handful_of_samples():
    assert s.interval_ranks(100, 4, 0.5) is None


def test_signed_rank_cut_leaves_as_many_out_at_either_end():
    data = np.random.default_rng(3).standard_normal(15)
    cut = s.signed_rank_cut(15, 0.01)
    averages = s.walsh_averages(data)
    assert s.signed_rank_interval(data, 0.01) == (averages[cut], averages[-1 - cut])
    assert s.signed_rank_cut(0, 0.05) is None
    assert s.signed_rank_cut(9, 0.002) is None
