from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from steadytorch.errors import UsageError
from steadytorch.measure.race import LOOKS
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.budget import KEEP, OVERTIME, SCREEN_BLOCKS, Budget
from steadytorch.tune.select import BlockShape


def after(spent_s, block_s):
    """A budget of 60 s with the given time spent and block time."""
    times = iter([0.0])
    budget = Budget(60.0, lambda: next(times, spent_s))
    budget.shape = BlockShape(8, block_s * 1e8)
    assert budget.shape.expected_s == pytest.approx(block_s)
    return budget


def test_all_looks_are_planned_where_they_fit():
    assert after(0.0, 0.1).looks() == LOOKS


def test_looks_that_do_not_fit_are_not_planned():
    within_s = (1 + OVERTIME) * 30.0
    assert after(0.0, within_s / LOOKS[1] * 1.001).looks() == LOOKS[:1]
    assert after(0.0, within_s / LOOKS[1] * 0.999).looks() == LOOKS[:2]


@pytest.mark.parametrize("spent_s", [60.0, 300.0])
def test_one_look_is_always_taken(spent_s):
    assert after(spent_s, 1.0).looks() == LOOKS[:1]


@pytest.mark.parametrize(("spent_s", "enough"), [(58.0, False), (40.0, True)])
def test_what_cannot_even_be_confirmed_is_refused_with_numbers(spent_s, enough):
    budget = after(spent_s, 2.5 / LOOKS[0])
    assert budget.confirmation_s() == pytest.approx(5.0)
    refused = pytest.raises(UsageError, match=r"a budget of 60 s .* took 58 s; give at least 184 s")
    with nullcontext() if enough else refused:
        budget.require_confirmation()


@pytest.mark.parametrize(("factors", "blocks"), [([], 0.0), ([1.0], 1.0), ([1.0, 0.5, 0.1], 1.6)])
def test_screening_takes_a_few_blocks_of_every_arm(factors, blocks):
    budget = after(0.0, 0.4)
    times_ns = [factor * budget.shape.iteration_ns for factor in factors]
    assert budget.screening_s(times_ns) == pytest.approx(SCREEN_BLOCKS * blocks * 0.4)


def test_until_a_candidate_was_timed_only_the_confirmation_is_kept_back():
    budget = after(0.0, 0.4)
    assert budget.reserve_s() == pytest.approx(2 * LOOKS[0] * 0.4)


@pytest.mark.parametrize(
    ("finalists", "share", "arms"), [(0, 0.1, 1), (1, 0.1, 2), (KEEP, 0.1, KEEP), (1, 0.95, 3)]
)
def test_the_race_is_expected_to_be_among_candidates_as_fast_as_the_fastest(finalists, share, arms):
    budget = after(0.0, 0.4)
    budget.fastest_ns, budget.finalists = share * budget.shape.iteration_ns, finalists
    race_s = LOOKS[0] * arms * share * 0.4
    assert budget.reserve_s() == pytest.approx(race_s + budget.confirmation_s())


def test_most_of_the_budget_is_for_exploring_however_slow_the_workload():
    budget = after(0.0, 2.0)
    budget.fastest_ns = budget.shape.iteration_ns
    assert budget.left_to_explore() > 30.0


def compiled(mode="default"):
    return (TransformSpec("compile", (("mode", mode),)),)


def set_up(candidate, setup_s):
    return SimpleNamespace(candidate=candidate, set_up=SimpleNamespace(setup_s=setup_s))


@pytest.mark.parametrize(("layers", "seconds"), [(0, 13.0), (170, 24.9), (430, 43.1)])
def test_a_compiler_is_expected_to_take_longer_for_more_layers(layers, seconds):
    budget = Budget(60.0, lambda: 0.0, layers)
    budget.shape = BlockShape(8, 1.0)
    assert budget.expected_setup_s(compiled(), []) == pytest.approx(seconds, abs=0.1)
    assert budget.expected_setup_s((), []) == pytest.approx(7.0, abs=0.1)


def test_an_engine_is_guessed_at_less_than_a_compiler():
    budget = Budget(60.0, lambda: 0.0)
    budget.shape = BlockShape(8, 1.0)
    engine = (TransformSpec("openvino", (("precision", "f32"),)),)
    assert budget.expected_setup_s(engine, []) < budget.expected_setup_s(compiled(), [])


def test_the_first_guess_is_corrected_by_what_was_seen():
    budget = Budget(60.0, lambda: 0.0, 100)
    budget.shape = BlockShape(8, 1.0)
    seen = [set_up(compiled(), 45.0), set_up((), 0.1)]  # guessed at 15 s
    assert budget.expected_setup_s(compiled(), seen) == pytest.approx(50.0, abs=0.1)
    other = budget.expected_setup_s(compiled("reduce-overhead"), seen)
    assert other == pytest.approx(50.0, abs=0.1)
    heavy = budget.expected_setup_s(compiled("max-autotune"), seen)
    assert heavy == pytest.approx(5 + 6 * 45.0, abs=0.1)


def test_a_set_up_that_outlasts_its_expected_time_is_expected_to_take_longer():
    budget = Budget(60.0, lambda: 0.0)
    left = [budget.left_to_set_up_s(20.0, elapsed) for elapsed in (0.0, 12.0, 20.0, 60.0)]
    assert left == [20.0, 8.0, 4.0, 12.0]


def test_a_confirmation_is_costed_at_the_time_of_the_fastest():
    budget = Budget(60.0, lambda: 0.0)
    budget.shape = BlockShape(5, 100e6)
    before_s = budget.confirmation_s()
    budget.fastest_ns = 10e6
    assert budget.confirmation_s() == pytest.approx(0.55 * before_s)


def test_a_winner_may_take_longer_blocks_than_slower_candidates():
    budget = Budget(600.0, lambda: 0.0)
    budget.shape = BlockShape(1, 600e6)  # such iterations are all kept, those below 500 ms are not
    assert budget.left_without_race() < 600.0 - budget.confirmation_s()
    budget.fastest_ns = 100e6
    assert budget.left_without_race() == 600.0 - budget.confirmation_s()


def test_overtime_is_a_fifth_of_the_budget_and_granted_once():
    budget = Budget(60.0, lambda: 0.0)
    assert budget.may_add_s() == pytest.approx(12.0)
    budget.overtime_s += budget.may_add_s()
    assert (budget.may_add_s(), budget.remaining()) == (0.0, pytest.approx(72.0))


@pytest.mark.parametrize(("began", "spent_s"), [(None, 3.0), (-5.0, 8.0)])
def test_what_came_before_the_budget_was_known_may_be_counted(began, spent_s):
    times = iter([0.0])
    budget = Budget(60.0, lambda: next(times, 3.0), began=began)
    if began is not None:
        next(times)
    assert budget.spent() == spent_s
    assert budget.remaining() == 60.0 - spent_s
