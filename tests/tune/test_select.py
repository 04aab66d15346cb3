import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.measure.race import TIE, RaceResult
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.select import (
    P99_BLOCK,
    SearchOptions,
    block_shape,
    block_statistic,
    choose,
    over_memory,
)

A, B, C = (TransformSpec(name) for name in ("alpha", "beta", "gamma"))


def _race(*times, survivors=None):
    rows = tuple(tuple([time] * 12) for time in times)
    return RaceResult(survivors or tuple(range(len(times))), rows, 0)


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("objective", "speed", ("'speed'", "latency, p99, throughput, contended")),
        ("precision", "int4", ("'int4'", "same, tf32, fp16, bf16, int8")),
        ("tolerance", 0.0, ("0.0", "between 0 and 1")),
        ("tolerance", 1.0, ("1.0", "such as 0.01")),
        ("tolerance", -0.1, ("-0.1",)),
        ("tolerance", float("nan"), ("nan",)),
        ("budget_s", 0.0, ("0.0 s", "not a positive time")),
        ("budget_s", -5.0, ("-5.0 s",)),
        ("budget_s", float("nan"), ("nan s",)),
    ],
)
def test_a_wrong_option_is_refused_with_its_value_and_what_is_possible(field, value, words):
    with pytest.raises(UsageError) as caught:
        SearchOptions(**{field: value})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("tolerance", [None, 1e-6, 0.999])
def test_tolerances_between_zero_and_one_are_taken(tolerance):
    assert SearchOptions(precision="bf16", tolerance=tolerance).tolerance == tolerance


@pytest.mark.parametrize(
    ("objective", "metric"),
    [
        ("latency", "latency"),
        ("p99", "latency"),
        ("contended", "latency"),
        ("throughput", "period"),
    ],
)
def test_what_is_timed_follows_from_the_objective(objective, metric):
    assert SearchOptions(objective=objective).metric == metric


@pytest.mark.parametrize(
    ("asked", "is_training", "objective"),
    [
        ("auto", True, "throughput"),
        ("auto", False, "latency"),
        ("latency", True, "latency"),
        ("p99", False, "p99"),
    ],
)
def test_auto_is_throughput_for_training_and_latency_for_inference(asked, is_training, objective):
    assert SearchOptions(objective=asked).resolved(is_training).objective == objective


# -- blocks -----------------------------------------------------------------------------------


@given(st.floats(min_value=1, max_value=1e12))
def test_a_block_has_up_to_ten_iterations_and_fewer_the_longer_one_takes(iteration_ns):
    shape = block_shape(SearchOptions(), iteration_ns)
    assert 1 <= shape.count <= 10
    assert shape.count >= block_shape(SearchOptions(), 2 * iteration_ns).count
    assert shape.iteration_ns == iteration_ns


@pytest.mark.parametrize(
    ("iteration_ns", "count"), [(1e3, 10), (7e6, 7), (20e6, 5), (200e6, 3), (1e9, 1)]
)
def test_the_length_of_a_block(iteration_ns, count):
    assert block_shape(SearchOptions(), iteration_ns).count == count


@pytest.mark.parametrize(
    ("iteration_ns", "budget_s", "count"),
    [(10e6, 10, 5), (110e6, 60, 5), (110e6, 30, 1), (200e6, 60, 3), (200e6, 45, 1)],
)
def test_blocks_are_shorter_where_a_claim_would_take_too_much_of_the_budget(
    iteration_ns, budget_s, count
):
    assert block_shape(SearchOptions(budget_s=budget_s), iteration_ns).count == count


def test_a_block_is_expected_to_take_its_iterations_and_those_thrown_away():
    assert block_shape(SearchOptions(), 200e6).expected_s == pytest.approx(1.0)
    assert block_shape(SearchOptions(), 1e9).expected_s == pytest.approx(1.0)


@pytest.mark.parametrize("objective", ["p99", "contended"])
def test_a_block_for_p99_is_long_enough_for_its_largest_sample_to_stand_for_the_tail(objective):
    options = SearchOptions(objective=objective)
    assert block_shape(options, 1e6).count == P99_BLOCK
    samples = np.random.default_rng(0).lognormal(size=(4000, P99_BLOCK))
    maxima = [block_statistic(options, row) for row in samples]
    assert np.median(maxima) == pytest.approx(np.quantile(samples, 0.99), rel=0.02)


@pytest.mark.parametrize("objective", ["p99", "contended"])
@pytest.mark.parametrize(
    ("iteration_ns", "count"), [(10e6, 69), (20e6, 50), (60e6, 16), (200e6, 10), (1e9, 3), (3e9, 1)]
)
def test_a_block_for_a_tail_takes_about_a_second_and_slow_ones_leave_time(
    objective, iteration_ns, count
):
    assert block_shape(SearchOptions(objective=objective), iteration_ns).count == count
    whole = SearchOptions(objective=objective, budget_s=3600.0)
    assert block_shape(whole, iteration_ns).count == max(count, 10)


def test_the_statistic_of_other_blocks_is_their_median():
    assert block_statistic(SearchOptions(), [1, 2, 100]) == 2.0
    assert block_statistic(SearchOptions(objective="throughput"), [1, 2, 100]) == 2.0


# -- constraints and choice -------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 1 << 30, (1 << 30) + 1])
def test_memory_up_to_the_cap_is_fine(cap):
    assert over_memory(1 << 30, SearchOptions(max_memory_bytes=cap)) is None


@pytest.mark.parametrize(
    ("peak", "cap", "said"),
    [
        (3 << 29, 1 << 30, "peaks at 1.50 GiB, over the cap of 1.00 GiB"),
        (410 << 20, 1, "peaks at 410 MiB, over the cap of 1 B"),
    ],
)
def test_memory_over_the_cap_is_named_with_both_figures(peak, cap, said):
    assert over_memory(peak, SearchOptions(max_memory_bytes=cap)) == said


def test_the_fastest_is_chosen_where_it_is_clearly_so():
    assert choose(_race(10, 8, 9), [(), (A, B), (C,)], [0, 0, 0]) == 1


def test_a_dropped_arm_is_not_chosen_however_fast_its_blocks():
    assert choose(_race(10, 1, 9, survivors=(0, 2)), [(), (A,), (B,)], [0, 0, 0]) == 2


@pytest.mark.parametrize("slower", [0.0, 0.5 * TIE, 0.99 * TIE])
def test_within_the_tie_band_the_one_with_fewest_transforms_is_chosen(slower):
    assert choose(_race(10, 10 * (1 + slower)), [(A, B), (C,)], [0, 0]) == 1
    assert choose(_race(10, 10 * (1 + slower)), [(A, B), ()], [0, 0]) == 1


def test_beyond_the_tie_band_time_decides():
    assert choose(_race(10, 10 * (1 + 1.1 * TIE)), [(A, B), ()], [0, 0]) == 0


def test_among_equally_simple_ones_memory_decides_and_then_the_name():
    assert choose(_race(10, 10, 10), [(A,), (B,), (C,)], [5, 4, 4]) == 1
    assert choose(_race(10, 10, 10), [(C,), (B,), (A,)], [4, 4, 4]) == 2


def test_without_any_block_the_simplest_is_chosen():
    assert choose(RaceResult((0, 1), ((), ()), 0), [(), (A,)], [9, 0]) == 0


@given(st.permutations([((), 3), ((A,), 2), ((B,), 2), ((A, B), 1)]))
def test_the_choice_among_equals_does_not_depend_on_their_order(arms):
    candidates, peaks = zip(*arms, strict=True)
    assert candidates[choose(_race(10, 10, 10, 10), candidates, peaks)] == ()
