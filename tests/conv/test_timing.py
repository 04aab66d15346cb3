from __future__ import annotations

from random import Random

import pytest
import torch

from steadytorch.conv.choices import ATEN
from steadytorch.conv.timing import (
    BENCHMARK,
    HOPELESS,
    RACE_LOOKS,
    SCREEN_ROUNDS,
    Arm,
    Measured,
    WorkThread,
    device_answers,
    promising,
    record_all,
    take_rounds,
)
from steadytorch.errors import UnsupportedError


class Steady(Arm):
    """An arm whose block times vary little."""

    def __init__(self, name: str, ns: float) -> None:
        super().__init__(Measured(name), lambda: None)
        self._ns, self._rng = ns, Random(name)

    def block_ns(self, flush: object, lead: object, repeats: int = 3) -> float:
        return self._rng.gauss(self._ns, 0.005 * self._ns)


def taken(stop=lambda: False, incumbent=None):
    arms: list[Arm] = [Steady("eng1", 1000), Steady("eng2", 1050), Steady("eng3", 1500)]
    take_rounds(arms, None, Random(0), stop, incumbent)
    return {arm.found.choice: len(arm.times_ns) for arm in arms}


def test_what_is_far_behind_is_screened_only():
    assert taken()["eng3"] == SCREEN_ROUNDS
    assert taken()["eng1"] >= SCREEN_ROUNDS + RACE_LOOKS[0]


def test_the_incumbent_races_however_far_behind():
    assert taken(incumbent="eng3")["eng3"] >= SCREEN_ROUNDS + RACE_LOOKS[0]


@pytest.mark.parametrize("incumbent", [None, "eng3"])
def test_where_the_time_is_over_there_is_a_screening(incumbent):
    assert set(taken(lambda: True, incumbent).values()) == {SCREEN_ROUNDS}


def test_a_summary_has_the_median_and_the_spread():
    arm = Steady("eng1", 1000)
    arm.times_ns.extend([90.0, 100.0, 110.0, 120.0, 80.0])
    found = arm.summary()
    assert (found.median_ns, found.spread, found.runs) == (100.0, 0.1, 5)


def test_one_block_has_no_spread():
    arm = Steady("eng1", 1000)
    arm.times_ns.append(90.0)
    found = arm.summary()
    assert (found.median_ns, found.spread, found.runs) == (90.0, None, 1)


@pytest.mark.parametrize(
    ("name", "incumbent", "rounds"),
    [
        ("eng4", None, 1),
        (ATEN, None, SCREEN_ROUNDS),
        (BENCHMARK, None, SCREEN_ROUNDS),
        ("eng4", "eng4", SCREEN_ROUNDS),
    ],
)
def test_what_is_hopeless_runs_once_unless_it_is_shown_or_was_chosen(name, incumbent, rounds):
    slow = Steady(name, 1.1 * HOPELESS * 1000)
    take_rounds([Steady("eng1", 1000), slow], None, Random(0), lambda: True, incumbent)
    assert len(slow.times_ns) == rounds


@pytest.mark.parametrize("name", [None, ATEN, BENCHMARK, "eng4"])
def test_an_engine_that_is_hopeless_is_run_once_and_not_recorded(name):
    """`name` is the slow arm's, or None for an engine that is no incumbent."""
    slow = Steady(name or "eng4", 1.1 * HOPELESS * 1000)
    arms = [Steady("eng1", 1000), slow, Steady("eng2", 0.9 * HOPELESS * 1000)]
    kept = promising(arms, None, name)
    assert kept == [arm for arm in arms if name or arm is not slow]
    assert [len(arm.times_ns) for arm in arms] == [0, 0 if name else 1, 0]


def test_an_engine_that_raises_when_run_once_is_excluded():
    class Raising(Steady):
        def block_ns(self, flush, lead, repeats=3):
            raise RuntimeError("boom")

    arms: list[Arm] = [Raising("eng1", 1), Steady("eng2", 1000), Steady("eng3", 1500)]
    assert promising(arms, None) == arms[1:]
    assert arms[0].found.excluded == "RuntimeError: boom"


def orders(seed):
    """The order of the arms in each round."""
    ran: list[str] = []

    class Seen(Steady):
        def block_ns(self, flush, lead, repeats=3):
            ran.append(self.found.choice)
            return super().block_ns(flush, lead)

    arms = [Seen(f"eng{number}", 1000) for number in range(6)]
    take_rounds(arms, None, Random(seed), lambda: len(ran) >= 60)
    return [tuple(ran[at : at + len(arms)]) for at in range(0, len(ran), len(arms))]


def test_each_round_has_an_order_of_its_own_which_the_seed_decides():
    rounds = orders(0)
    assert len(rounds) == 10
    assert all(sorted(order) == sorted(rounds[0]) for order in rounds)
    assert len(set(rounds)) > 8
    assert orders(0) == rounds
    assert orders(1) != rounds


class Recorded(Steady):
    """An arm that notes its stream and pool when recorded, and raises its fault, if any."""

    def __init__(self, name: str, fault: Exception | None = None) -> None:
        super().__init__(name, 1000)
        self.fault = fault
        self.place: tuple = ()

    def record(self, stream, pool):
        self.place = (stream, pool)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


@pytest.mark.usefixtures("streams")
def test_after_a_recording_that_failed_others_get_a_stream_and_memory_of_their_own():
    arms = [Recorded("eng1"), Recorded("eng2", RuntimeError("boom")), Recorded("eng3")]
    arms.append(Recorded("eng4"))
    assert record_all(arms) == [arms[0], arms[2], arms[3]]
    assert arms[1].summary() == Measured("eng2", excluded="RuntimeError: boom")
    places = [arm.place for arm in arms]
    assert places[0] == places[1]
    assert places[2] == places[3]
    assert not set(places[0]) & set(places[2])


def lost(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(("initialized", "answers"), [(False, True), (True, False)])
def test_a_device_that_raises_when_waited_for_no_longer_answers(monkeypatch, initialized, answers):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert device_answers() is answers


@pytest.mark.usefixtures("streams")
def test_nothing_more_is_recorded_on_a_device_that_is_lost(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    arms = [Recorded("eng1", RuntimeError("illegal")), Recorded("eng2")]
    with pytest.raises(UnsupportedError, match="eng1 made the device unusable"):
        record_all(arms)
    assert arms[1].place == ()


def test_a_thread_raises_what_its_work_raised_once_and_goes_on():
    thread, done = WorkThread(), []
    with pytest.raises(KeyError, match="boom"):
        thread.run(lambda: {}["boom"])
    thread.run(lambda: done.append(1))
    assert done == [1]
    thread.close()
