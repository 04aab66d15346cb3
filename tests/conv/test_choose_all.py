from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from steadytorch.conv import choose_all as room
from steadytorch.conv.choices import ATEN, Choice
from steadytorch.conv.choose import ChoiceOptions, ConvOutcome
from steadytorch.conv.choose_all import LEAST_S, SPARE, Result, choose_all, share_s
from steadytorch.conv.problem import parse
from steadytorch.conv.timing import Measured
from steadytorch.errors import UnsupportedError

CPU = torch.device("cpu")
FIRST = parse("fprop/bias/fp16/last/i8x64x56x56/w64x64x3x3/s1x1/p1x1/d1x1/g1")
PROBLEMS = [structs.replace(FIRST, input=(8, 64, side, side)) for side in (56, 28, 14, 7)]
"""From the largest to the smallest."""


class Bench:
    """Choosing with a fake clock; each problem takes its time limit or longer.

    Attributes:
        asked_s: seconds that each problem was given, in the order they were chosen for.
        takes_s: seconds that a problem takes whatever it was given.
        sound: problems that were given the first sound engine.
        unsound: engines that do not verify.
        faults: what choosing raises, by problem.
        alive: whether the device answers.
    """

    def __init__(self, monkeypatch):
        self.clock_s, self.takes_s = 100.0, None
        self.asked_s, self.sound, self.faults, self.incumbents = {}, [], {}, {}
        self.alive, self.deadly, self.unsound = True, None, ()
        monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=lambda: self.clock_s))
        monkeypatch.setattr(room, "choose", self.choose)
        monkeypatch.setattr(room, "first_sound", self.first_sound)
        monkeypatch.setattr(room, "device_answers", lambda: self.alive)

    def choose(self, problem, device, options, incumbent):
        self.asked_s[problem] = options.seconds
        self.incumbents[problem] = incumbent
        self.clock_s += self.takes_s or options.seconds
        self.alive = problem != self.deadly
        if problem in self.faults:
            raise self.faults[problem]
        return ConvOutcome(problem.key, "eng1", 2.0, 2.0, 1.0, (), 0.1)

    def first_sound(self, problem, device, options, incumbent):
        self.clock_s += 0.1
        self.sound.append(problem)
        if problem in self.faults:
            raise self.faults[problem]
        keeps = incumbent is not None and incumbent.engine not in self.unsound
        name = str(incumbent) if keeps else "eng7"
        return ConvOutcome(problem.key, name, None, None, None, (Measured(name),), 0.1)

    def run(self, seconds=40.0, before=None, grace_s=1.0, problems=PROBLEMS, **options):
        given = {problem: ChoiceOptions(**options) for problem in problems}
        counts = dict.fromkeys(problems, 1)
        end = self.clock_s + seconds
        found = choose_all(given, counts, before or {}, CPU, end, grace_s)
        assert found.keys() == {problem.key for problem in problems}
        return [found[problem.key] for problem in problems]


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


@pytest.mark.parametrize("seconds", [4.0, 10.0, 40.0])
def test_all_are_reached_where_each_takes_what_it_was_given(bench, seconds):
    found = bench.run(seconds)
    assert [one.reason for one in found] == [None] * 4
    assert list(bench.asked_s) == PROBLEMS
    assert sum(bench.asked_s.values()) <= seconds + 1e-9
    assert min(bench.asked_s.values()) >= LEAST_S


def test_the_large_ones_get_more_but_no_more_than_was_asked_for(bench):
    bench.run(20.0)
    times = list(bench.asked_s.values())
    assert times[0] == 8.0
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]


def test_what_one_does_not_use_is_there_for_the_others(bench):
    bench.takes_s = 0.1
    bench.run(6.0, problems=PROBLEMS[2:])
    assert sum(bench.asked_s.values()) > 6.0


def test_what_occurs_often_comes_first(bench):
    counts = dict(zip(PROBLEMS, (1, 1, 1, 1000), strict=True))
    choose_all(dict.fromkeys(PROBLEMS, ChoiceOptions()), counts, {}, CPU, 140.0, 1.0)
    assert next(iter(bench.asked_s)) == PROBLEMS[3]


@pytest.mark.parametrize(
    ("weights", "left_s", "expected"),
    [
        ((1, 1, 1, 1), 10.0, LEAST_S + SPARE / 4 * (10.0 - 4 * LEAST_S)),
        ((3, 1), 10.0, 10.0 - LEAST_S),
        ((1,), 10.0, 10.0),
        ((5, 1, 1), 2 * LEAST_S, LEAST_S),
        ((1, 1), LEAST_S / 2, LEAST_S / 2),
    ],
)
def test_each_has_the_least_and_the_rest_is_shared_by_weight(weights, left_s, expected):
    assert share_s(weights, left_s) == pytest.approx(expected)


def test_what_is_not_reached_gets_the_first_engine_that_is_sound(bench):
    bench.takes_s = 20.3
    found = bench.run()
    assert [one.choice for one in found] == [Choice("eng1")] * 2 + [Choice("eng7")] * 2
    assert bench.sound == PROBLEMS[2:]
    assert all("time ran out before; this is the first" in one.reason for one in found[2:])
    assert all(one.outcome.chosen_ns is None for one in found[2:])


def test_where_it_is_too_late_for_that_too_pytorchs_own_is_left(bench):
    bench.takes_s = 50.0
    assert bench.run()[1:] == [Result(None, None, "the time ran out before")] * 3
    assert bench.sound == []


def test_where_none_is_sound_both_reasons_are_told(bench):
    bench.takes_s, bench.faults = 20.3, {PROBLEMS[2]: UnsupportedError("none is sound")}
    assert bench.run()[2] == Result(None, None, "the time ran out before, and none is sound")


@pytest.mark.parametrize(
    ("unsound", "kept", "words"),
    [
        ((), "eng3", "this is the engine chosen earlier, which verifies"),
        (("eng3",), "eng7", "first"),
    ],
)
def test_what_was_chosen_before_stays_where_it_is_not_reached_and_verifies(
    bench, unsound, kept, words
):
    bench.takes_s, bench.unsound = 20.3, unsound
    found = bench.run(before={problem.key: Choice("eng3") for problem in PROBLEMS})
    assert bench.incumbents == dict.fromkeys(PROBLEMS[:2], Choice("eng3"))
    assert bench.sound == PROBLEMS[2:]
    for one in found[2:]:
        assert one.choice == Choice(kept)
        assert one.outcome.chosen == Measured(kept)
        assert words in one.reason


def test_where_it_is_too_late_to_verify_what_was_chosen_before_pytorch_runs_it(bench):
    bench.takes_s = 50.0
    found = bench.run(before={problem.key: Choice("eng3") for problem in PROBLEMS})
    assert found[1:] == [Result(None, None, "the time ran out before")] * 3
    assert bench.sound == []


def test_pytorchs_own_that_was_chosen_before_stays_unverified(bench):
    bench.takes_s = 50.0
    found = bench.run(before={problem.key: Choice(ATEN) for problem in PROBLEMS})
    assert found[1:] == [Result(Choice(ATEN), None, "the time ran out before")] * 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "OutOfMemoryError: CUDA out of mem"),
        (RuntimeError("boom"), "RuntimeError: boom"),
        (UnsupportedError("no engine"), "no engine"),
    ],
)
def test_a_fault_is_of_its_own_problem_alone(bench, fault, reason):
    bench.faults = {PROBLEMS[1]: fault}
    found = bench.run(before={PROBLEMS[1].key: Choice("eng3")})
    assert [one.choice for one in found] == [Choice("eng1"), None, Choice("eng1"), Choice("eng1")]
    assert found[1].outcome is None
    assert found[1].reason.startswith(reason)
    assert "ran out" not in found[1].reason
    assert bench.sound == []


def test_a_device_that_is_lost_ends_choosing_and_what_was_chosen_stays(bench):
    bench.deadly = PROBLEMS[1]
    bench.faults = {PROBLEMS[1]: RuntimeError("illegal memory access")}
    found = bench.run(before={PROBLEMS[3].key: Choice("eng3")})
    assert [one.choice for one in found] == [Choice("eng1"), None, None, None]
    assert found[1].reason == "RuntimeError: illegal memory access"
    assert [one.reason for one in found[2:]] == ["the device failed at an earlier problem"] * 2
    assert list(bench.asked_s) == PROBLEMS[:2]
    assert bench.sound == []
