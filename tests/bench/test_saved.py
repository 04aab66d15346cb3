from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct, t, ttest_ind

from steadytorch.bench.saved import compare_saved, welch_interval
from steadytorch.measure.race import ALPHA, POWER
from steadytorch.measure.statistics import detectable
from steadytorch.results.compare import Effect

MS = 1_000_000

FIVE = (10.0e6, 10.1e6, 10.2e6, 9.9e6, 10.05e6)


def _scaled(factor):
    return tuple(factor * value for value in FIVE)


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.1, "slower"), (0.9, "faster"), (1.002, "undecided")]
)
def test_five_processes_each_claim_for_the_machine(factor, verdict):
    found = compare_saved(("a.json", FIVE), ("b.json", _scaled(factor)))
    effect = found.effect
    assert (effect.verdict, effect.claim, effect.processes) == (verdict, "machine", 5)
    assert effect.low < effect.estimate < effect.high
    assert effect.estimate == pytest.approx(factor - 1)
    assert (effect.pairs, found.note, found.metric) == (0, "", "period")
    error = ttest_ind(np.log(FIVE), np.log(_scaled(factor)), equal_var=False)._standard_error
    errors = np.log1p(effect.mde) / error
    assert nct.sf(t.ppf(0.995, 8), 8, errors) == pytest.approx(0.9, abs=1e-6)


def test_the_detectable_effect_of_saved_results_is_found_in_nine_of_ten_cases():
    rng, found, looked_for = np.random.default_rng(1), 0, detectable(8, ALPHA, POWER)
    effect = looked_for * 0.01 * np.sqrt(2 / 5)
    for _ in range(400):
        a, b = np.exp(0.01 * rng.standard_normal((2, 5)))
        found += compare_saved(("a", a), ("b", b * np.exp(effect))).effect.verdict == "slower"
    assert 0.84 <= found / 400 <= 0.94


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (FIVE[:1], FIVE[:1], "1 process on one side"),
        (FIVE[:2], FIVE, "2 processes on one side"),
        (FIVE, FIVE[:2], "2 processes on one side"),
    ],
)
def test_fewer_than_three_processes_decide_nothing(a, b, said):
    found = compare_saved(("a", a), ("b", tuple(2 * value for value in b)))
    effect = found.effect
    assert (effect.verdict, effect.claim) == ("undecided", "process")
    assert (effect.low, effect.high, effect.mde) == (None, None, None)
    assert said in found.note
    assert "--processes 5" in found.note
    assert not effect.slower_than(0.02)


def test_processes_without_any_difference_are_no_division_by_zero():
    found = compare_saved(("a", (10.0,) * 3), ("b", (11.0,) * 3))
    assert (found.effect.low, found.effect.verdict) == (pytest.approx(0.1), "slower")


TIMES = st.lists(st.floats(1e3, 1e12), min_size=3, max_size=8)


@given(TIMES, TIMES)
def test_saved_results_never_raise_and_the_interval_holds_the_estimate(a, b):
    effect = compare_saved(("a", a), ("b", b)).effect
    rounding = 1e-9 * (1 + abs(effect.estimate))
    assert effect.low - rounding <= effect.estimate <= effect.high + rounding


def test_the_interval_is_welchs():
    a, b = np.log(FIVE), np.log([11.0, 10.0, 10.4, 10.9])
    expected = ttest_ind(b, a, equal_var=False).confidence_interval(0.99)
    assert welch_interval(a, b, 0.99) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("low", "slower"), [(None, False), (0.02, False), (0.021, True)])
def test_slower_than_asks_the_lower_end(low, slower):
    effect = Effect(
        estimate=0.5, low=low, high=0.9, verdict="slower", claim="process", pairs=20, processes=1,
        mde=0.01,
    )  # fmt: skip
    assert effect.slower_than(0.02) is slower
