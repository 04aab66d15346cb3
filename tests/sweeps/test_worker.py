"""Real processes that share a folder. Their search is a short sleep."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import msgspec
import pytest
from sweeping import items

from steadytorch.errors import UsageError
from steadytorch.results.sweep import SweepRow
from steadytorch.sweeps.worker import SweepFolder, lease_timeout_s

PATIENCE_S = 120
RUNNING = b'{"workload":"workload0","status":"running"}'


def rows(tmp_path, count=24):
    return SweepFolder(tmp_path / "sweep", items(count)).rows()


def check_complete(tmp_path, count=24):
    found = rows(tmp_path, count)
    assert [row.workload for row in found] == [f"workload{number}" for number in range(count)]
    assert {row.status for row in found} == {"done"}
    names = sorted(name for name in os.listdir(tmp_path / "sweep") if not name.startswith("log"))
    assert [name for name in names if name.endswith(".json")] == [
        f"{number:08x}.json" for number in range(count)
    ]
    return found


def logged(tmp_path):
    """How often each workload was begun."""
    lines = (tmp_path / "sweep" / "log").read_text().splitlines()
    return Counter(line.split()[0] for line in lines)


def test_processes_share_the_work(tmp_path, start):
    workers = [start(shard=f"{number}/3") for number in (1, 2, 3)]
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0, 0]
    found = check_complete(tmp_path)
    assert set(logged(tmp_path).values()) == {1}
    assert len({row.worker for row in found}) > 1
    assert not list((tmp_path / "sweep").glob("*.lease"))


@pytest.mark.parametrize("kills", [3, *[20] * 5])
@pytest.mark.sampled(every=6)
def test_killed_workers_lose_nothing(tmp_path, start, kills):
    """Each of the killed is replaced. The searches last until all kills have happened."""
    chance = random.Random(kills)
    workers = [start(seconds=0.1, timeout=0.5, shard=f"{number}/2") for number in (1, 2)]
    for _ in range(kills):
        time.sleep(chance.uniform(0.05, 0.35))
        victim = chance.randrange(2)
        workers[victim].kill()
        workers[victim].wait()
        workers[victim] = start(seconds=0.1, timeout=0.5, shard=f"{victim + 1}/2")
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0]
    check_complete(tmp_path)


def test_a_worker_that_dies_on_an_item_takes_it_last(tmp_path, start):
    """So that an item which kills its workers does not keep the others from being done."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "00000000.0.lease").write_text("dead:1")
    assert start(count=4, timeout=0.5).wait(PATIENCE_S) == 0
    check_complete(tmp_path, 4)
    assert (folder / "log").read_text().split()[::2][-1] == "workload0"


def test_a_paused_worker_that_was_taken_over_changes_nothing(tmp_path):
    """Its lease is gone and its result exists when it goes on."""
    shared = SweepFolder(tmp_path, items(1), worker="fast:1")
    other = SweepFolder(tmp_path, items(1), worker="slow:2")
    finished = []

    def slow(item):
        assert shared.write(item, row("fast:1")) == row("fast:1")
        return row("slow:2")

    other.work(other.items, slow, finished.append)
    assert finished == [row("fast:1")]
    assert [each.worker for each in other.rows()] == ["fast:1"]


def row(worker, status="done"):
    return SweepRow(workload="workload0", status=status, worker=worker)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"workload":1}', b"\xff" * 9, RUNNING])
def test_a_damaged_result_is_made_anew(tmp_path, damage):
    shared = SweepFolder(tmp_path, items(1))
    (tmp_path / "00000000.json").write_bytes(damage)
    assert shared.rows()[0].status == "waiting"
    shared.work(shared.items, lambda item: row("w:1"))
    assert msgspec.json.decode((tmp_path / "00000000.json").read_bytes())["worker"] == "w:1"


def test_an_interrupted_item_is_free_again(tmp_path):
    def interrupted(item):
        raise KeyboardInterrupt

    shared = SweepFolder(tmp_path, items(2))
    with pytest.raises(KeyboardInterrupt):
        shared.work(shared.items, interrupted)
    assert [each.status for each in shared.rows()] == ["waiting", "waiting"]
    assert not list(tmp_path.iterdir())


def test_rows_name_who_works(tmp_path):
    shared = SweepFolder(tmp_path, items(2), worker="host:7")
    with shared.leases.claim("00000001", None):
        found = shared.rows()
    assert [(each.status, each.worker) for each in found] == [
        ("waiting", None),
        ("running", "host:7"),
    ]


def test_failures_are_kept_until_forgotten(tmp_path):
    shared = SweepFolder(tmp_path, items(2))
    shared.work(shared.items[:1], lambda item: row("w:1", "failed"))
    shared.work(shared.items, lambda item: row("w:2"))
    assert [each.worker for each in shared.rows()] == ["w:1", "w:2"]
    again = SweepFolder(tmp_path, items(2))
    again.forget_failures()
    again.work(again.items, lambda item: row("w:3"))
    assert [each.worker for each in again.rows()] == ["w:3", "w:2"]


def test_lists_share_a_folder(tmp_path):
    first, second = SweepFolder(tmp_path, items(3)[:2]), SweepFolder(tmp_path, items(3)[1:])
    first.work(first.items, lambda item: row("w:1"))
    second.work(second.items, lambda item: row("w:2"))
    assert [each.worker for each in second.rows()] == ["w:1", "w:2"]
    assert len(first.rows()) == 2


@pytest.mark.parametrize("place", ["/proc/sweep", "/dev/null", "/dev/full/x", "a\0b"])
def test_an_unusable_folder_is_named(place):
    from pathlib import Path

    with pytest.raises(UsageError, match="cannot be used"):
        SweepFolder(Path(place), items(1)).check()


def test_a_folder_that_fills_up_ends_the_work(tmp_path, monkeypatch):
    from steadytorch.sweeps import worker

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    shared = SweepFolder(tmp_path, items(1))
    monkeypatch.setattr(worker, "write_whole", full)
    with pytest.raises(UsageError, match="No space left on device"):
        shared.work(shared.items, lambda item: row("w:1"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1e9"])
def test_a_wrong_timeout_is_named(monkeypatch, text):
    monkeypatch.setenv("STEADYTORCH_SWEEP_LEASE", text)
    with pytest.raises(UsageError, match="STEADYTORCH_SWEEP_LEASE"):
        lease_timeout_s()


def test_the_timeout_is_half_a_minute_by_default(monkeypatch):
    monkeypatch.delenv("STEADYTORCH_SWEEP_LEASE", raising=False)
    assert lease_timeout_s() == 30.0
