from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.errors import UsageError
from steadytorch.sweeps.shard import Shard, parse_shard

SLURM = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "5",
}


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({}, Shard(0, 1)),
        (SLURM, Shard(2, 4)),
        (SLURM | {"SLURM_ARRAY_TASK_STEP": "2"}, Shard(1, 4)),
        ({"SLURM_ARRAY_TASK_ID": "7"}, Shard(7)),
        ({"JOB_COMPLETION_INDEX": "3"}, Shard(3)),
        ({"RANK": "1", "WORLD_SIZE": "8"}, Shard(1, 8)),
        ({"RANK": "1"}, Shard(0, 1)),
        (SLURM | {"RANK": "1", "WORLD_SIZE": "8"}, Shard(2, 4)),
        ({"JOB_COMPLETION_INDEX": "", "RANK": "x", "WORLD_SIZE": "-2"}, Shard(0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "0"}, Shard(0, 1)),
        ({"SLURM_ARRAY_TASK_ID": "4294967294", "SLURM_ARRAY_TASK_COUNT": "0"}, Shard(2**32 - 2)),
    ],
)
def test_auto_reads_the_launcher(environment, shard):
    assert parse_shard("auto", environment) == shard


def test_a_part_is_counted_from_one():
    assert parse_shard("2/3", SLURM) == Shard(1, 3)


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "1/0", "a/b", "1/2/3", "-1/2", "AUTO"])
def test_other_shards_are_refused(text):
    with pytest.raises(UsageError, match="neither auto nor K/N"):
        parse_shard(text, {})


def test_workers_start_at_their_part():
    starts = [Shard(index, 4).order(range(24))[0] for index in range(4)]
    assert starts == [0, 6, 12, 18]
    assert [Shard(index).order(range(3))[0] for index in range(5)] == [0, 1, 2, 0, 1]


@given(st.integers(0, 50), st.none() | st.integers(1, 60), st.integers(0, 40))
def test_every_worker_sees_every_item_once(index, count, items):
    assert sorted(Shard(index, count).order(range(items))) == list(range(items))
