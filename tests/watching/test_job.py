"""Ranks share their times through a real store."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import TCPStore

from steadytorch.watching import job
from steadytorch.watching.job import Job


@pytest.fixture
def environment():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
    }
    del server


def ranks(environment, numbers):
    jobs = [Job({**environment, "RANK": str(rank)}) for rank in numbers]
    for each in jobs:  # a watch each in processes of their own
        each._prefix = jobs[0]._prefix
    return jobs


def test_the_first_rank_collects_the_times_of_all(environment):
    first, second, third = ranks(environment, range(3))
    found = []
    waiting = threading.Thread(target=lambda: found.append(first.exchange({"rest": (1.0, 0.1)})))
    waiting.start()
    assert third.exchange({"rest": (3.0, 0.1)}) == ({}, "")
    assert second.exchange({"rest": (2.0, 0.1)}) == ({}, "")
    waiting.join()
    assert found == [({rank: {"rest": (rank + 1.0, 0.1)} for rank in range(3)}, "")]


def test_a_rank_that_does_not_answer_is_named(environment, monkeypatch):
    monkeypatch.setattr(job, "DEADLINE_S", 0.2)
    first, second = ranks(environment, range(2))
    second.exchange({"rest": (2.0, 0.1)})
    times, remark = first.exchange({"rest": (1.0, 0.1)})
    assert sorted(times) == [0, 1]
    assert remark == "No times within 0 s from rank 2."


def test_a_store_that_is_gone_costs_the_comparison_alone(environment, monkeypatch):
    monkeypatch.setattr(job, "DEADLINE_S", 0.2)
    (first,) = ranks({**environment, "MASTER_PORT": "1"}, [0])
    times, remark = first.exchange({"rest": (1.0, 0.1)})
    assert times == {}
    assert remark.startswith("Ranks are not compared: ")


def test_without_torchrun_there_is_no_job():
    alone = Job({"WORLD_SIZE": "4", "RANK": "2"})
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.exchange({"rest": (1.0, 0.1)}) == ({}, "")
