from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytorch.conv.blocks import (
    LEAST_CYCLES,
    MOST_CYCLES,
    REPEATS,
    TRIES,
    Flush,
    Lead,
    block_ns,
)


class Queue:
    """A fake device that records its work and can be ahead of the host.

    Attributes:
        seen: what was enqueued, in order.
        early: of the runs to come, those that it comes to before they are enqueued.
        took_ms: of each timed run that counts, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.early: set[int] = set()
        self.took_ms = [3.0, 1.0, 2.0]
        self.asked = 0
        queue = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.place = 0

            def record(self) -> None:
                queue.seen.append("event")
                self.place = len(queue.seen)

            def query(self) -> bool:
                assert queue.seen[-1] == "run"
                queue.asked += 1
                return queue.asked - 1 in queue.early

            def elapsed_time(self, end: Event) -> float:
                assert queue.seen[-1] == "synchronize"
                assert end.place == self.place + 2  # nothing but the run in between
                return queue.took_ms.pop(0)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.seen.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", self.seen.append)

    def run(self) -> None:
        self.seen.append("run")

    def flush(self) -> None:
        self.seen.append("flush")

    @property
    def leads(self) -> list[int]:
        return [entry for entry in self.seen if isinstance(entry, int)]


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


@pytest.mark.parametrize("cold", [True, False])
def test_each_run_is_timed_by_itself_after_a_flush_where_the_cache_is_to_be_cold(queue, cold):
    flush: Any = queue.flush if cold else None
    assert block_ns(queue.run, flush, Lead()) == 2e6
    one = (["flush"] if cold else []) + ["event", "run", "event"]
    assert queue.seen == [*one * REPEATS, "synchronize"]


@pytest.mark.parametrize("late", range(REPEATS))
def test_a_block_with_a_run_that_was_late_is_taken_anew_with_a_lead(queue, late):
    queue.early = {late, REPEATS + late}
    assert block_ns(queue.run, None, Lead()) == 2e6
    assert queue.leads == [LEAST_CYCLES, 2 * LEAST_CYCLES]
    one = ["event", "run", "event"] * REPEATS
    assert queue.seen == [*one, LEAST_CYCLES, *one, 2 * LEAST_CYCLES, *one, "synchronize"]


def test_a_host_that_is_never_fast_enough_does_not_hold_up_forever(queue):
    queue.early = set(range(1000))
    assert block_ns(queue.run, None, Lead()) == 2e6
    assert len(queue.leads) == TRIES - 1
    assert max(queue.leads) == queue.leads[-1] == MOST_CYCLES


def test_a_lead_that_was_needed_stays_for_what_is_compared(queue):
    lead = Lead()
    queue.early = {0}
    for _ in range(3):
        queue.took_ms = [1.0] * REPEATS
        block_ns(queue.run, None, lead)
    assert queue.leads == [LEAST_CYCLES] * 3


@pytest.mark.parametrize("l2_bytes", [2**20, 60 * 2**20])
def test_a_flush_writes_twice_the_cache_and_touches_the_input_without_changing_it(
    monkeypatch, l2_bytes
):
    properties = SimpleNamespace(L2_cache_size=l2_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kept, made, empty = torch.arange(4.0), [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **how: made.append(empty(*size, **how)) or made[0]
    )
    flush = Flush(torch.device("cpu"), kept)
    (junk,) = made
    junk.fill_(1)
    order = junk._version, kept._version
    flush()
    assert junk.nbytes >= 2 * l2_bytes
    assert not junk.any()
    assert (junk._version, kept._version) == (order[0] + 1, order[1] + 1)
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0]
