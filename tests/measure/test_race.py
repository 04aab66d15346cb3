from random import Random

import numpy as np
import pytest
from scipy.stats import nct, t

from steadytorch.errors import UsageError
from steadytorch.measure.race import ALPHA, LOOKS, POWER, compare, judge, machine_claim, race
from steadytorch.measure.statistics import detectable, signed_rank_cut, walsh_averages


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


@pytest.mark.parametrize("apart", [0.0, 0.002, 0.01])
def test_race_that_may_lose_a_little_ends_early_and_loses_no_more(apart):
    lost, rounds = [], []
    for seed in range(60):
        arms = [_arm(1.0 + apart * k, 100 * seed + k) for k in range(3)]
        result = race(arms, rng=Random(seed), loss=0.0025)
        lost.append(apart * result.leader)
        rounds.append(len(result.times[result.leader]))
    assert np.mean(lost) < 0.0025
    assert np.mean(rounds) < 0.6 * LOOKS[-1]


def test_race_in_which_an_arm_dies_late_goes_on():
    times = iter([1.0] * 10 + [float("inf")] * 50)
    result = race([_arm(1.0, 1), lambda: next(times)], rng=Random(0), loss=0.0025)
    assert (result.leader, result.survivors) == (0, (0,))


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


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(1.0, 2.0), (1.0, float("nan"))], "pair 1"),
        ([(1.0, 0.0)], "pair 0"),
        ([(-1.0, 2.0)], "pair 0"),
        ([(1.0, float("inf"))], "pair 0"),
        ([1.0, 2.0], "shape"),
        ([(1.0, 2.0, 3.0)], "shape"),
        ([("a", "b")], "pairs"),
    ],
)
def test_what_is_no_pair_of_times_is_refused(pairs, words):
    with pytest.raises(UsageError, match=words):
        judge(pairs)


def test_detectable_effect_follows_its_formula():
    pairs = _pairs(0.0, 60, spread=0.03, seed=5)
    judgement = judge(pairs)
    spread = np.std([np.log(b / a) for a, b in pairs], ddof=1)
    assert (judgement.verdict, judgement.pairs) == ("undecided", 60)
    errors = np.log1p(judgement.mde) / (1.02 * spread / np.sqrt(60))
    assert nct.sf(t.ppf(0.999, 59), 59, errors) == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize("count", [27, 60])
def test_the_detectable_effect_is_found_in_nine_of_ten_cases(count):
    rng = np.random.default_rng(count)
    noise = 0.01 * rng.standard_normal((600, count))
    scale = 1.02 * 0.01 / np.sqrt(count)
    effect = detectable(count - 1, ALPHA / len(LOOKS), POWER) * scale
    cut = signed_rank_cut(count, ALPHA / len(LOOKS))
    found = sum(walsh_averages(row)[cut] > 0 for row in noise + effect)
    assert 0.87 <= found / 600 <= 0.94


def test_looser_error_makes_smaller_effects_detectable():
    pairs = _pairs(0.0, 60, spread=0.05, seed=3)
    assert judge(pairs, alpha=0.2).mde < judge(pairs).mde


def test_units_of_time_do_not_matter():
    pairs = _pairs(0.02, 60)
    in_other_units = judge([(1e6 * a, 1e6 * b) for a, b in pairs])
    assert in_other_units.verdict == judge(pairs).verdict
    assert in_other_units.estimate == pytest.approx(judge(pairs).estimate)


def test_race_of_many_looks_as_soon_as_an_interval_exists():
    # 8 arms put the level at 0.01 / 35, for which 12 rounds are one too few.
    arms = [_arm(1.0, 0), *(_arm(2.0, seed) for seed in range(1, 8))]
    result = race(arms, rng=Random(0))
    assert result.survivors == (0,)
    assert len(result.times[0]) == 13


def test_one_process_claims_nothing_about_the_machine():
    found = machine_claim([-0.1])
    assert (found.low, found.high, found.verdict, found.claim) == (
        None,
        None,
        "undecided",
        "process",
    )
    assert found.estimate == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("estimates", "verdict"),
    [
        ([-0.10, -0.11, -0.10, -0.105, -0.10], "faster"),
        ([0.03, 0.031, 0.029], "slower"),
        ([0.0001, -0.0001, 0.0, 0.0002, -0.0002], "tie"),
        ([-0.10, 0.02, -0.05], "undecided"),
    ],
)
def test_processes_that_agree_make_a_claim_about_the_machine(estimates, verdict):
    found = machine_claim(estimates)
    assert (found.verdict, found.claim, found.processes) == (verdict, "machine", len(estimates))
    assert found.mde >= 0
    assert found.low < found.estimate < found.high


def test_machine_interval_is_students_on_logarithms():
    from scipy.stats import t

    logs = np.log1p([-0.10, -0.12, -0.09, -0.11])
    low, high = t.interval(0.99, 3, logs.mean(), logs.std(ddof=1) / 2)
    found = machine_claim([-0.10, -0.12, -0.09, -0.11])
    assert (found.low, found.high) == pytest.approx((np.expm1(low), np.expm1(high)))


@pytest.mark.parametrize("estimates", [[], [float("nan")], [-1.0], [0.1, float("inf")]])
def test_estimates_that_are_no_effects_are_refused(estimates):
    with pytest.raises(UsageError):
        machine_claim(estimates)
