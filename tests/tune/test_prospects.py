import pytest

from steadytorch.tune.prospects import ENOUGH, Prospects


def misses(count):
    prospects = Prospects()
    for _ in range(count):
        prospects.note(100.0, 100.0)
    return prospects


def test_the_expected_gain_falls_with_every_candidate_that_does_not_improve():
    found = [misses(count).expected_gain(4) for count in range(20)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(0.02 * 4 / 5)
    assert found[-1] < ENOUGH


def test_more_candidates_promise_more_and_none_nothing():
    found = [misses(5).expected_gain(count) for count in range(10)]
    assert found == sorted(found)
    assert found[0] == 0.0


def test_an_improvement_raises_it_by_its_size():
    small, large = misses(10), misses(10)
    small.note(100.0, 98.0)
    large.note(100.0, 92.0)
    assert large.expected_gain(4) > small.expected_gain(4) > misses(10).expected_gain(4)


def test_a_change_below_what_is_enough_is_no_improvement():
    one, other = misses(3), misses(4)
    one.note(100.0, 99.5)
    assert one.expected_gain(4) == other.expected_gain(4)


def test_a_great_leap_is_not_expected_again():
    leap = misses(0)
    leap.note(100.0, 10.0)
    assert leap.expected_gain(1000) <= 0.10
