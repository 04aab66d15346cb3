from __future__ import annotations

from random import Random

import msgspec
import pytest

import steadytorch
from steadytorch.bench import compare as module
from steadytorch.bench.bench_worker import SetUp
from steadytorch.bench.compare import compare_live
from steadytorch.errors import UsageError
from steadytorch.measure.sampler import WarmUp
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import TransformSpec

MS = 1_000_000


@pytest.fixture
def sides():
    """Two workloads that scripted workers never run."""
    made = steadytorch.Workload(lambda: None)
    return (made, (), "first"), (made, (), "second")


def _blocks(level_ns, *, seed=0, ends=None, after=0, noise=0.002):
    """Answers to `block`: noise around a level, and an exception after some of them."""
    rng, taken = Random(seed), []

    def block(metric, count):
        taken.append(metric)
        if ends is not None and len(taken) > after:
            raise ends
        return [int(level_ns * rng.gauss(1.0, noise)) for _ in range(count)]

    return {"block": block}


# -- real processes -----------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "2 pairs of processes are too few for a verdict" in found.note
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


class Clock:
    """Time in seconds that passes by blocks only."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(module, "monotonic", lambda: self.now)

    def slows(self, script, seconds):
        """The script with blocks that take some time."""
        block = script["block"]

        def slow(metric, count):
            self.now += seconds
            return block(metric, count)

        return {**script, "block": slow}


def test_a_budget_that_ends_keeps_the_interval_of_the_last_look(sides, scripted, monkeypatch):
    clock, told = Clock(monkeypatch), []
    scripts = [clock.slows(_blocks(2 * MS, seed=seed, noise=0.1), 5) for seed in (1, 2)]
    started = scripted(module, *scripts)
    found = compare_live(*sides, budget="150s", on_pair=lambda *pair: told.append(pair))
    assert told == [(number, 60) for number in range(1, 16)]
    assert [len(pairs) for pairs in found.samples] == [15]
    assert (found.verdict, found.pairs) == ("undecided", 12)
    assert found.effect.low < 0 < found.effect.high
    assert found.note == (
        "the budget of 150 s ended after 15 of at most 60 pairs of blocks: raise --budget"
    )
    assert all(worker.killed for worker in started)


def test_a_budget_too_small_for_a_pair_takes_one(sides, scripted, monkeypatch):
    clock = Clock(monkeypatch)
    scripted(module, *[clock.slows(_blocks(2 * MS, seed=seed), 5) for seed in (1, 2)])
    found = compare_live(*sides, budget=1)
    assert (found.verdict, found.pairs, found.effect.low) == ("undecided", 1, None)


def test_a_verdict_within_the_budget_has_no_note(sides, scripted, monkeypatch):
    clock = Clock(monkeypatch)
    scripts = [clock.slows(_blocks(level, seed=1), 5) for level in (2 * MS, 3 * MS)]
    scripted(module, *scripts)
    found = compare_live(*sides, budget="2m")
    assert (found.verdict, found.pairs, found.note) == ("slower", 12, "")


def test_processes_share_the_budget_and_what_others_leave(sides, scripted, monkeypatch):
    clock = Clock(monkeypatch)
    levels = [(2 * MS, 3 * MS), (2 * MS, 2 * MS), (2 * MS, 2 * MS)]
    scripts = [
        clock.slows(_blocks(level, seed=7 * i + j, noise=0.1), 5)
        for i, pair in enumerate(levels)
        for j, level in enumerate(pair)
    ]
    scripted(module, *scripts)
    found = compare_live(*sides, processes=3, budget=420)
    # The first needs 120 s of its 140, which leaves 150 s for each of the others.
    assert [len(pairs) for pairs in found.samples] == [12, 15, 15]
    assert found.note == (
        "the budget of 420 s ended early in 2 of 3 pairs of processes: raise --budget"
    )


def test_no_processes_are_a_usage_error(sides, scripted):
    scripted(module)
    with pytest.raises(UsageError, match="0 processes"):
        compare_live(*sides, processes=0)


# -- library functions --------------------------------------------------------------------------


def test_workloads_are_compared_live_by_their_names(sides, scripted):
    scripted(module, _blocks(10 * MS), _blocks(9 * MS, seed=1))
    first, second = (steadytorch.Workload(each[0].model, name=each[2]) for each in sides)
    found = steadytorch.compare(first, second, metric="period")
    assert (found.a.name, found.b.name, found.metric) == ("first", "second", "period")
    assert found.effect.verdict == "faster"


def test_each_workload_is_run_with_its_own_candidate(sides, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "compare_live", lambda *given, **rest: asked.append((given, rest)))
    candidates = ((), (TransformSpec("channels_last"),))
    steadytorch.compare(sides[0][0], sides[1][0], candidates=candidates, processes=3, seed=5)
    (((_, first, _), (_, second, _)), rest) = asked[0]
    assert (first, second) == candidates
    assert (rest["processes"], rest["seed"]) == (3, 5)


def test_a_workload_and_a_file_are_not_compared(sides, tmp_path):
    for pair in [(sides[0][0], tmp_path / "b.json"), ("a.json", sides[0][0])]:
        with pytest.raises(UsageError, match="pass two files or two workloads"):
            steadytorch.compare(*pair)


def test_an_unknown_metric_is_refused_before_anything_is_started(sides):
    with pytest.raises(UsageError, match="unknown metric 'speed'"):
        steadytorch.compare(sides[0][0], sides[1][0], metric="speed")
