from __future__ import annotations

from collections import Counter
from threading import Barrier, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.runtime.churn import WITHHELD, ChurnGuard

STREAMS = st.lists(st.integers(0, 30), max_size=400)


def _granted(guard, stream):
    """The calls, by position, at which tuning was granted."""
    return [i for i, signature in enumerate(stream) if guard.observe(signature) is None]


def test_the_first_signatures_are_tuned_on_first_sight():
    guard = ChurnGuard(first_sight=2)
    assert [guard.observe(s) for s in ("a", "b", "c")] == [None, None, WITHHELD]


def test_a_granted_signature_stays_granted():
    guard = ChurnGuard(first_sight=1)
    assert [guard.observe("a") for _ in range(3)] == [None] * 3
    assert guard.observe("b") == WITHHELD


def test_calls_are_counted_until_tuning_is_granted():
    guard = ChurnGuard(first_sight=1)
    for signature in ("a", "a", "b", "a", "b"):
        guard.observe(signature)
    assert guard.why().startswith("2 signatures in 3 calls")


def test_another_is_tuned_once_its_own_calls_would_have_paid():
    guard = ChurnGuard(first_sight=0, break_even_calls=10)
    assert _granted(guard, ["a"] * 12) == [10, 11]


def test_signatures_that_never_repeat_are_never_tuned():
    guard = ChurnGuard(first_sight=3, break_even_calls=5)
    assert _granted(guard, range(5000)) == [0, 1, 2]


def test_the_reason_comes_with_its_numbers():
    guard = ChurnGuard(first_sight=0)
    for i in range(60):
        guard.observe(i if i < 41 else 0)
    assert guard.why() == (
        "41 signatures in 60 calls without a plan, 1.5 calls each; "
        "tuning one costs ~30 s and pays back after ~2,000 calls"
    )


def test_there_are_numbers_before_the_first_call():
    assert "0 signatures in 0 calls" in ChurnGuard().why()


def test_forgotten_signatures_are_not_counted_as_known():
    guard = ChurnGuard(first_sight=0, remembered=10)
    for i in range(30):
        guard.observe(i)
    assert guard.why().startswith("more than 10 signatures in 30 calls")


def test_measured_set_ups_correct_the_guess():
    guard = ChurnGuard(first_sight=0, setup_s=10, break_even_calls=100)
    guard.paid(30.0, 0.9)
    assert "costs ~20 s and pays back after ~40 calls" in guard.why()
    assert _granted(guard, ["a"] * 41) == [40]


def test_set_ups_that_gain_nothing_raise_the_break_even():
    guard = ChurnGuard(first_sight=0, setup_s=1, break_even_calls=10)
    for _ in range(9):
        guard.paid(1.0, 0.0)
    assert "after ~100 calls" in guard.why()
    assert _granted(guard, ["a"] * 101) == [100]


@pytest.mark.parametrize(
    "cost", [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_impossible_costs_are_refused(cost):
    with pytest.raises(UsageError, match="cannot cost"):
        ChurnGuard().paid(*cost)


@pytest.mark.parametrize(
    "argument",
    [
        {"setup_s": 0},
        {"break_even_calls": 0},
        {"first_sight": -1},
        {"remembered": 0},
        {"setup_s": float("nan")},
        {"break_even_calls": float("inf")},
    ],
)
def test_numbers_out_of_range_are_refused(argument):
    with pytest.raises(UsageError, match=next(iter(argument))):
        ChurnGuard(**argument)


@given(STREAMS, st.integers(0, 5), st.integers(1, 20))
def test_cost_is_at_most_twice_perfect_foresight_beyond_first_sight(stream, credit, patience):
    """Costs in calls that could have gained: a set-up is worth `patience` of them."""
    guard = ChurnGuard(first_sight=credit, break_even_calls=patience)
    tuned, cost = set(), 0
    for signature in stream:
        if signature in tuned:
            continue
        if guard.observe(signature) is None:
            tuned.add(signature)
            cost += patience
        else:
            cost += 1
    foresight = sum(min(calls, patience) for calls in Counter(stream).values())
    assert cost <= 2 * foresight + credit * patience


@given(STREAMS, st.integers(1, 10))
def test_counts_are_bounded_and_never_too_high(stream, remembered):
    guard = ChurnGuard(first_sight=0, break_even_calls=3, remembered=remembered)
    calls = Counter()
    for signature in stream:
        calls[signature] += 1
        if guard.observe(signature) is None:
            assert calls[signature] > 3
        assert len(guard._counts) <= remembered


@given(STREAMS, st.integers(31, 40))
def test_with_room_for_all_each_is_granted_exactly_when_it_has_earned_it(stream, remembered):
    guard = ChurnGuard(first_sight=0, break_even_calls=3, remembered=remembered)
    calls = Counter()
    for signature in stream:
        calls[signature] += 1
        assert (guard.observe(signature) is None) == (calls[signature] > 3)


def test_a_repeating_signature_is_not_forgotten():
    guard = ChurnGuard(first_sight=0, break_even_calls=20, remembered=10)
    stream = [i if i % 9 else "hot" for i in range(1, 400)]
    assert {stream[i] for i in _granted(guard, stream)} == {"hot"}


def test_threads_lose_no_call():
    guard = ChurnGuard(first_sight=0, break_even_calls=3999)
    start, granted = Barrier(4), []

    def work():
        start.wait()
        granted.extend(i for i in range(1000) if guard.observe("a") is None)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 1
    assert "1 signature in 4,000 calls" in guard.why()
