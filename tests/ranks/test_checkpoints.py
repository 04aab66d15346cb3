"""Ranks end a plan at the same step; ranks are threads over an in-memory store."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch.distributed as dist

from steadytorch.ranks.checkpoints import AHEAD, Checkpoints
from steadytorch.ranks.group import Ranks

EVERY = 4


def run(faults, size=2, steps=60, seed=0, store=None, deadline_s=10.0, stops=None):
    """Steps at which each rank ended the plan, with the reasons.

    Args:
        faults: step to reason, by rank.
        size: number of ranks.
        steps: steps of each rank.
        seed: seed of the delays between steps.
        store: the store; None for a new one.
        deadline_s: the deadline.
        stops: step at which a rank leaves, by rank.
    """
    store = store or dist.HashStore()

    def one(rank):
        rng = random.Random(f"{seed} {rank}")
        points = Checkpoints(Ranks(rank, size, store, "t", deadline_s), "p", every=EVERY)
        ended, leads = [], []
        for step in range(1, steps + 1):
            if (stops or {}).get(rank) == step:
                break
            if (ending := points.at(faults.get(rank, {}).get(step))) is not None:
                assert ending.step == step
                ended.append((step, str(ending)))
            leads.append((time.monotonic(), step))
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.01)
        return ended, points.lost, leads

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_end_the_plan_at_the_same_step(seed):
    rng = random.Random(seed)
    size, at = rng.choice([2, 3, 4]), rng.randrange(1, 40)
    found = run({rng.randrange(size): {at: "wrong outputs"}}, size, seed=seed)
    (first, *_), *_ = ended = [each for each, _, _ in found]
    assert all(each == [first] for each in ended)
    assert at < first[0] <= at + AHEAD * EVERY
    assert first[1].endswith("wrong outputs")


@pytest.mark.parametrize("seed", range(6))
def test_faults_on_several_ranks_end_the_plan_once_for_one_reason(seed):
    found = run({0: {9: "of rank 0"}, 1: {8 + seed: "of rank 1"}}, seed=seed)
    ended = [each for each, _, _ in found]
    assert ended[0][:1] == ended[1][:1]


def test_the_plan_can_end_again_after_it_was_made_anew():
    found = run({1: {3: "first", 40: "second"}})
    for ended, _, _ in found:
        assert [reason for _, reason in ended] == ["rank 1: first", "rank 1: second"]
    assert found[0][0] == found[1][0]


def test_without_faults_nothing_ends():
    assert [each[0] for each in run({})] == [[], []]


def test_ranks_are_never_further_apart_than_two_checkpoints():
    (_, _, one), (_, _, other) = run({}, seed=3)
    reached = [(at, 0, step) for at, step in one] + [(at, 1, step) for at, step in other]
    steps = [0, 0]
    for _, rank, step in sorted(reached):
        steps[rank] = step
        assert abs(steps[0] - steps[1]) <= 2 * EVERY + 1
    assert all(a <= b for a, b in pairwise([step for _, step in one]))


def test_a_missing_rank_ends_the_waiting_at_the_deadline():
    found = run({}, deadline_s=0.3, stops={1: 5}, steps=20)
    assert found[0][1] == "a rank was missing for 0.3 s"
    assert found[0][0] == []


class Broken:
    """A store that fails, or hangs, from some call on."""

    def __init__(self, hangs):
        self._hangs = hangs

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments):
            if self._hangs:
                time.sleep(5)
            raise RuntimeError("connection reset")

        return call


@pytest.mark.parametrize("hangs", [False, True])
def test_a_lost_store_stops_nothing(hangs, monkeypatch):
    points = Checkpoints(Ranks(0, 2, dist.HashStore(), "t", 0.2), "p", every=EVERY)
    monkeypatch.setattr(points, "_store", Broken(hangs))
    assert [points.at() for _ in range(3 * EVERY)] == [None] * (3 * EVERY)
    assert points.lost == ("no answer within 0.2 s" if hangs else "RuntimeError: connection reset")


def test_damaged_bytes_are_a_lost_store():
    store = dist.HashStore()
    points = Checkpoints(Ranks(0, 1, store, "t", 1.0), "p", every=EVERY)
    dist.PrefixStore("p", store).set("ending/0", b"{broken")
    for _ in range(EVERY):
        assert points.at() is None
    assert points.lost is not None
