"""Changes of level in series of results, on simulated series."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from steadytorch.errors import UsageError
from steadytorch.measure.changes import ALPHA, find_changes, rank_sum_counts, rank_sum_tail, shift


def series(*levels, sd=0.004, seed=0):
    """Values at levels given as (count, level)."""
    rng = np.random.default_rng(seed)
    means = np.concatenate([np.full(count, level) for count, level in levels])
    return means + sd * rng.standard_normal(len(means))


@pytest.mark.parametrize("step", [0.02, -0.02])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_two_percent_is_found_within_five_commits(step, seed):
    (found,) = find_changes(series((40, 0.0), (5, step), sd=0.002, seed=seed))
    assert abs(found.index - 40) <= 1
    assert found.found <= 44
    assert found.low < step < found.high


def test_the_place_and_the_size_are_refined_by_later_values():
    (found,) = find_changes(series((40, 0.0), (60, 0.02)))
    assert abs(found.index - 40) <= 1
    assert found.earliest <= found.index <= found.latest
    assert found.low < 0.02 < found.high
    assert found.high - found.low < 0.008


def test_two_changes_are_found_and_told_apart():
    first, second = find_changes(series((40, 0.0), (40, 0.02), (40, 0.0)))
    assert (abs(first.index - 40), abs(second.index - 80)) <= (1, 1)
    assert first.estimate > 0 > second.estimate


def test_a_found_change_stays_found():
    values = series((40, 0.0), (60, 0.02))
    established = find_changes(values)[0].found
    for end in range(established + 1, len(values)):
        assert [each.found for each in find_changes(values[:end])] == [established]
    assert find_changes(values[:established]) == []


@pytest.mark.parametrize("seed", range(3))
def test_single_outliers_make_no_change(seed):
    values = series((100, 0.0), seed=seed)
    values[[50, 51, 70, 97]] += 0.5
    assert find_changes(values) == []


@pytest.mark.parametrize("values", [[], [1.0], [0.0] * 200, list(np.arange(9.0))])
def test_short_and_constant_series_have_no_change(values):
    assert find_changes(values) == []


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf], [[1.0]]])
def test_values_must_be_finite_numbers(values):
    with pytest.raises(UsageError, match="finite numbers"):
        find_changes(values)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", ["normal", "heavy", "skewed", "rounded"])
def test_false_changes_are_within_their_bound(kind):
    rng = np.random.default_rng(1)
    draw = {
        "normal": lambda: rng.standard_normal(100),
        "heavy": lambda: rng.standard_t(1.5, 100),
        "skewed": lambda: rng.exponential(size=100) ** 2,
        "rounded": lambda: rng.standard_normal(100).round(1),
    }[kind]
    false = sum(bool(find_changes(draw())) for _ in range(300))
    # P(Binomial(300, 1 %) > 9) is 0.1 %.
    assert false <= 9


def test_the_levels_of_all_tests_add_up_to_less_than_alpha():
    spent = sum(ALPHA * math.log(9.5) / (t * math.log(t) ** 2) for t in range(10, 1_000_000))
    assert 0.8 * ALPHA < spent < ALPHA


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 7)])
def test_counts_are_those_of_all_orders(n, m):
    tally = [0] * (n * m + 1)
    for places in combinations(range(n + m), n):
        tally[sum(places) - n * (n - 1) // 2] += 1
    assert rank_sum_counts(min(n, m), max(n, m)) == tally


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_the_tail_is_that_of_scipy(n, m, seed):
    rng = np.random.default_rng(seed)
    before, after = rng.random(n), rng.random(m)
    known = mannwhitneyu(after, before, alternative="greater", method="exact")
    assert rank_sum_tail(n, m, int(known.statistic)) == pytest.approx(known.pvalue)


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=12),
    st.lists(st.floats(-1, 1), min_size=1, max_size=12),
)
def test_the_interval_of_a_shift_holds_its_estimate(before, after):
    low, estimate, high = shift(np.array(before), np.array(after))
    assert low <= estimate <= high


@settings(max_examples=10)
@given(st.floats(0.5, 2.0), st.floats(-5, 5), st.integers(0, 100))
def test_units_do_not_matter(scale, offset, seed):
    values = series((40, 0.0), (20, 0.03), seed=seed)
    one, other = find_changes(values), find_changes(values * scale + offset)
    assert [each.found for each in one] == [each.found for each in other]


def test_intervals_of_the_size_cover_it():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        low, _, high = shift(rng.standard_normal(15), 1 + rng.standard_normal(10))
        covered += low <= 1 <= high
    assert covered >= 194  # P(Binomial(200, 99 %) < 194) is 0.5 %
