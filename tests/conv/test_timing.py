from __future__ import annotations

from random import Random

import pytest

from steadytorch.conv.timing import RACE_LOOKS, SCREEN_ROUNDS, Arm, Measured, take_rounds


class Steady(Arm):
    """An arm whose blocks take what they took the last time, nearly."""

    def __init__(self, name: str, ns: float) -> None:
        super().__init__(Measured(name), lambda: None)
        self._ns, self._rng = ns, Random(name)

    def block_ns(self, flush: object) -> float:
        return self._rng.gauss(self._ns, 0.005 * self._ns)


def taken(stop=lambda: False, incumbent=None):
    arms: list[Arm] = [Steady("eng1", 1000), Steady("eng2", 1050), Steady("eng3", 2000)]
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
