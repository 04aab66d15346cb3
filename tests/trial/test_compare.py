from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct, t, ttest_ind

import steadytorch
from steadytorch.errors import UsageError
from steadytorch.measure.race import ALPHA, POWER
from steadytorch.measure.sampler import WarmUp
from steadytorch.measure.statistics import detectable
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.transforms.base import TransformSpec
from steadytorch.trial import compare as module
from steadytorch.trial.compare import Effect, compare_live, compare_saved, welch_interval
from steadytorch.trial.worker import SetUp

MS = 1_000_000


@pytest.fixture
def sides():
    """Two workloads that scripted workers never run."""
    made = steadytorch.Workload(lambda: None)
    return (made, (), "first"), (made, (), "second")


def _blocks(level_ns, *, seed=0, ends=None, after=0):
    """Answers to `block`: noise around a level, and an exception after some of them."""
    rng, taken = Random(seed), []

    def block(metric, count):
        taken.append(metric)
        if ends is not None and len(taken) > after:
            raise ends
        return [int(level_ns * rng.gauss(1.0, 0.002)) for _ in range(count)]

    return {"block": block}


# -- real processes -----------------------------------------------------------------------------


def test_three_times_the_work_is_slower_and_fails_a_gate(workload, no_process_left):
    told = []
    found = compare_live(
        (workload("short"), (), "short"), (workload("thrice"), (), "thrice"), progress=told.append
    )
    assert told == ["pair of processes 1 of 1"]
    assert (found.effect.verdict, found.effect.claim) == ("slower", "process")
    assert found.effect.low <= found.effect.estimate <= found.effect.high
    assert found.effect.slower_than(0.02)
    assert found.a.median_ns < found.b.median_ns
    (pairs,) = found.samples
    assert len(pairs) == found.effect.pairs >= 12
    assert (found.note, found.failed, found.interrupted) == ("", None, False)


def test_a_workload_that_fails_at_once_is_named(workload, no_process_left):
    good, bad = (workload("short"), (), "good one"), (workload("at_once"), (), "bad one")
    with pytest.raises(UsageError, match="the workload bad one fails: RuntimeError: the data"):
        compare_live(good, bad)


# -- scripted workers ---------------------------------------------------------------------------


def test_the_same_against_itself_is_not_slower(sides, scripted):
    started = scripted(module, _blocks(2 * MS, seed=1), _blocks(2 * MS, seed=2))
    found = compare_live(*sides)
    assert found.effect.verdict in ("tie", "undecided")
    assert not found.effect.slower_than(0.0)
    assert all(worker.killed and not worker.directory.exists() for worker in started)


def test_a_faster_one_is_called_so(sides, scripted):
    scripted(module, _blocks(2 * MS, seed=1), _blocks(1.8 * MS, seed=2))
    found = compare_live(*sides)
    assert found.effect.verdict == "faster"
    assert found.effect.estimate == pytest.approx(-0.1, abs=0.005)
    assert (found.a.name, found.b.name) == ("first", "second")
    assert found.a.median_ns == pytest.approx(2 * MS, rel=0.01)
    assert found.b.median_ns == pytest.approx(1.8 * MS, rel=0.01)


def test_three_pairs_of_processes_are_three_replicates(sides, scripted):
    scripts = [
        _blocks(level, seed=i)
        for i, level in enumerate([2 * MS, 2.2 * MS, 2 * MS, 2.21 * MS, 2 * MS, 2.19 * MS])
    ]
    started = scripted(module, *scripts)
    found = compare_live(*sides, processes=3)
    assert len(started) == 6
    assert (found.effect.claim, found.effect.processes) == ("machine", 3)
    assert found.effect.verdict == "slower"
    assert found.effect.estimate == pytest.approx(0.1, abs=0.01)
    assert 0 < found.effect.mde < 0.1
    assert found.effect.pairs == sum(map(len, found.samples))


def test_two_pairs_of_processes_claim_nothing(sides, scripted):
    scripted(module, *[_blocks(2 * MS), _blocks(3 * MS)] * 2)
    found = compare_live(*sides, processes=2)
    effect = found.effect
    assert "2 pairs of processes support no verdict" in found.note
    assert (effect.verdict, effect.claim, effect.low) == ("undecided", "process", None)
    assert not effect.slower_than(0.02)


@pytest.mark.parametrize("metric", ["latency", "period"])
def test_blocks_are_of_the_metric_asked_for_and_short_where_iterations_are_long(
    sides, scripted, metric
):
    asked = []

    def block(metric, count):
        asked.append((metric, count))
        return [MS + len(asked)] * count

    long = SetUp(0.1, WarmUp(1, 3, 150 * MS, 1), 1)
    scripted(module, {"block": block, "set_up": long}, {"block": block})
    found = compare_live(*sides, metric=metric)
    assert set(asked) == {(metric, 3)}
    assert found.metric == metric


def test_each_side_is_set_up_with_its_own_transforms(sides, scripted):
    given, candidate = [], (TransformSpec("inference_mode"),)

    def set_up(candidate):
        given.append(candidate)
        return SetUp(0.1, WarmUp(1, 3, MS, 1), 1)

    scripted(module, *[{**_blocks(MS), "set_up": set_up}] * 2)
    (a, _, name), b = sides
    compare_live((a, candidate, name), b)
    assert [msgspec.convert(each, tuple[TransformSpec, ...]) for each in given] == [candidate, ()]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_midway_keeps_the_pairs_and_is_named(sides, scripted, failing):
    fault = WorkerFault(Fault.RAISED, "ValueError: no more data")
    scripts = [_blocks(2 * MS, seed=1), _blocks(2 * MS, seed=2)]
    scripts[failing] = _blocks(2 * MS, seed=3, ends=fault, after=7)
    started = scripted(module, *scripts)
    found = compare_live(*sides, processes=3)
    name = sides[failing][2]
    assert found.failed == f"the workload {name} fails: ValueError: no more data"
    assert found.note == f"stopped early: {found.failed}"
    assert [len(pairs) for pairs in found.samples] == [7]
    assert (found.effect.verdict, found.effect.pairs) == ("undecided", 7)
    assert len(started) == 2
    assert all(worker.killed for worker in started)


def test_an_interrupt_keeps_the_pairs(sides, scripted):
    ends = _blocks(3 * MS, seed=2, ends=KeyboardInterrupt(), after=7)
    started = scripted(module, _blocks(3 * MS, seed=1), ends)
    found = compare_live(*sides)
    assert found.interrupted
    assert [len(pairs) for pairs in found.samples] == [7]
    assert (found.effect.verdict, found.effect.pairs) == ("undecided", 7)
    assert (found.note, found.failed) == ("", None)
    assert all(worker.killed for worker in started)


def test_of_several_processes_the_whole_ones_count(sides, scripted):
    cut = _blocks(9 * MS, ends=KeyboardInterrupt(), after=5)
    whole = _blocks(2 * MS, seed=1), _blocks(2.2 * MS, seed=2)
    scripted(module, *whole, _blocks(2 * MS), cut)
    found = compare_live(*sides, processes=3)
    assert found.interrupted
    assert (found.effect.verdict, found.effect.processes) == ("slower", 1)
    assert [len(pairs) for pairs in found.samples][1:] == [5]


def test_an_interrupt_before_the_first_pair_is_raised(sides, scripted):
    started = scripted(module, {"set_up": KeyboardInterrupt()}, {})
    with pytest.raises(KeyboardInterrupt):
        compare_live(*sides)
    assert all(worker.killed and not worker.directory.exists() for worker in started)


def test_no_processes_are_a_usage_error(sides, scripted):
    scripted(module)
    with pytest.raises(UsageError, match="0 processes"):
        compare_live(*sides, processes=0)


# -- saved results ------------------------------------------------------------------------------

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
    assert effect.low <= effect.estimate * (1 + 1e-9) + 1e-9
    assert effect.estimate <= effect.high * (1 + 1e-9) + 1e-9


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
