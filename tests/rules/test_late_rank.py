from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.finding import Abstention
from steadytorch.rules.late_rank import rule

from ..findings.cases import MS, the, watched

USUAL = {"input_wait": 2 * MS, "forward": 10 * MS, "backward": 20 * MS, "rest": 1 * MS}


def ranks(size, late, name, by, waits="backward"):
    """Times of a job in which one rank takes longer in a slice, and the others wait."""
    found = {rank: dict(USUAL) for rank in range(size)}
    for rank, times in found.items():
        times[name if rank == late else waits] += by
    return with_errors(found)


def with_errors(ranks, share=0.01):
    """Means with a standard error of this share."""
    return {
        rank: {name: (mean, share * mean) for name, mean in times.items()}
        for rank, times in ranks.items()
    }


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["input_wait", "collection", "forward", "rest", "evaluation"])
def test_the_late_rank_and_its_slice_are_named(size, name):
    USUAL.setdefault(name, 0)
    found = the(rule(watched(ranks=ranks(size, size - 1, name, 5 * MS))))
    where = {"input_wait": "waiting for data", "collection": "garbage collection"}.get(name, name)
    assert found.title.startswith(f"rank {size - 1} is late by 5.00 ms a step")
    assert found.title.endswith(f"in {where}")
    assert "backward" in found.evidence[1]


def test_ranks_that_wait_for_buffers_in_forward_are_not_accused():
    found = the(rule(watched(ranks=ranks(4, 2, "input_wait", 5 * MS, waits="forward"))))
    assert found.title.startswith("rank 2 is late")
    assert "forward" in found.evidence[1]


@given(st.integers(2, 8), st.integers())
def test_equal_ranks_are_not_accused(size, seed):
    draw = random.Random(seed)
    alike = {
        rank: {name: value * draw.uniform(0.98, 1.02) for name, value in USUAL.items()}
        for rank in range(size)
    }
    assert rule(watched(ranks=with_errors(alike))) == ()


def test_a_rank_for_which_nobody_waits_is_not_late():
    times = {rank: dict(USUAL) for rank in range(3)}
    times[1]["input_wait"] += 10 * MS
    assert rule(watched(ranks=with_errors(times))) == ()


def test_one_process_abstains():
    assert isinstance(rule(watched()), Abstention)


def test_a_difference_within_its_error_is_chance():
    noisy = {
        rank: {name: (mean, 0.3 * mean) for name, (mean, _) in times.items()}
        for rank, times in ranks(2, 1, "input_wait", 5 * MS).items()
    }
    assert rule(watched(ranks=noisy)) == ()
