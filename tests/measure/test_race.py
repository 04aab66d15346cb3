from random import Random

import numpy as np
import pytest

from steadytorch.measure.race import LOOKS, compare, judge, race


def _pairs(effect, count, spread=0.01, seed=0):
    rng = np.random.default_rng(seed)
    return [(1.0, float(np.exp(effect + spread * rng.standard_normal()))) for _ in range(count)]


def _arm(time, seed, spread=0.01):
    rng = np.random.default_rng(seed)
    return lambda: time * float(np.exp(spread * rng.standard_normal()))


@pytest.mark.parametrize(("effect", "verdict"), [(-0.05, "faster"), (0.05, "slower")])
def test_a_clear_effect_is_found_at_the_first_look_with_its_interval(effect, verdict):
    judgement = judge(_pairs(effect, 60))
    assert (judgement.verdict, judgement.pairs) == (verdict, LOOKS[0])
    assert judgement.low < np.expm1(effect) < judgement.high


def test_nothing_between_two_equals_is_a_tie_when_the_noise_is_small():
    assert judge(_pairs(0.0, 60, spread=0.001)).verdict == "tie"


def test_noise_leaves_it_undecided_and_says_what_it_would_have_found():
    judgement = judge(_pairs(0.0, 60, spread=0.05, seed=3))
    assert judgement.verdict == "undecided"
    assert 0.01 < judgement.mde < 0.05


def test_false_verdicts_are_rare_on_equal_arms():
    verdicts = [judge(_pairs(0.0, 60, seed=seed)).verdict for seed in range(300)]
    assert sum(v in ("faster", "slower") for v in verdicts) <= 9


@pytest.mark.parametrize("count", [0, 1, 9, 11])
def test_too_few_pairs_decide_nothing(count):
    judgement = judge(_pairs(-0.5, count))
    assert (judgement.verdict, judgement.pairs) == ("undecided", count)


def test_pairs_after_the_deciding_look_do_not_matter():
    early = _pairs(-0.05, 12)
    assert judge(early) == judge([*early, *_pairs(+0.5, 48)])


def test_comparison_stops_as_soon_as_it_knows():
    judgement, pairs = compare(_arm(1.0, 1), _arm(0.9, 2), rng=Random(0))
    assert judgement.verdict == "faster"
    assert len(pairs) == LOOKS[0]


def test_comparison_alternates_at_random_and_pairs_the_right_arms():
    order = []
    compare(
        lambda: order.append("a") or 1.0,
        lambda: order.append("b") or 2.0,
        rng=Random(3),
    )
    firsts = order[::2]
    assert set(firsts) == {"a", "b"}


def test_comparison_that_is_stopped_keeps_its_pairs():
    left = iter([False, False, True])
    judgement, pairs = compare(lambda: 1.0, lambda: 2.0, rng=Random(0), stop=lambda: next(left))
    assert len(pairs) == 2
    assert judgement.verdict == "undecided"


def test_race_drops_the_slow_and_leads_with_the_fast():
    result = race([_arm(1.2, 1), _arm(1.0, 2), _arm(1.5, 3)], rng=Random(0))
    assert result.leader == 1
    assert result.survivors == (1,)


def test_race_keeps_what_it_cannot_tell_apart():
    result = race([_arm(1.0, 1), _arm(1.0005, 2), _arm(2.0, 3)], rng=Random(0))
    assert set(result.survivors) == {0, 1}


def test_race_of_one_has_a_winner():
    assert race([_arm(1.0, 1)], rng=Random(0)).survivors == (0,)


def test_race_rarely_drops_the_best():
    lost = 0
    for seed in range(60):
        arms = [_arm(1.0 + 0.004 * i, 10 * seed + i) for i in range(4)]
        lost += 0 not in race(arms, rng=Random(seed)).survivors
    assert lost <= 2


def test_race_stopped_at_once_still_names_a_leader():
    result = race([_arm(1.0, 1), _arm(1.1, 2)], rng=Random(0), stop=lambda: True)
    assert result.times == ((), ())
    assert set(result.survivors) == {0, 1}


def test_a_dead_arm_loses():
    result = race([_arm(1.0, 1), lambda: float("inf")], rng=Random(0))
    assert result.leader == 0
    assert result.survivors == (0,)
