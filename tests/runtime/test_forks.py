"""Tuned modules in a forked child answer as the model does, without waiting."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steadytorch.errors import UnsupportedError
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import settings
from steadytorch.runtime.forks import FORKED
from steadytorch.runtime.module import TunedModule
from steadytorch.transforms.threads import Threads
from steadytorch.workload.workload import Workload

from .conftest import CANDIDATES, always, answer, entries_of

DEADLINE_S = 60
THREADS = (TransformSpec("threads", (("count", 2),)),)
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")


def in_child(work):
    """What a function returns in a forked child; fails where it takes too long."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def run():
        torch.set_num_threads(1)
        sender.send(work())

    child = fork.Process(target=run)
    child.start()
    try:
        assert receiver.poll(DEADLINE_S), "the child hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


@pytest.fixture
def images():
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3)).eval()


@pytest.mark.parametrize("candidate", [THREADS, CANDIDATES["channels_last"]])
def test_a_child_runs_inherited_modules_untouched(wide, images, candidate):
    tuned = TunedModule(wide, always(candidate))
    with torch.no_grad():
        for _ in range(2):
            expected = tuned(images)
        found, calls = in_child(lambda: (tuned(images).sum().item(), tuned.report().calls))
    assert found == pytest.approx(expected.sum().item(), rel=1e-3)
    assert calls == {"tuned": 2, f"untouched: {FORKED}": 1}
    with torch.no_grad():
        tuned(images)
    assert tuned.report().calls == {"tuned": 3}
    tuned.close()


def test_refresh_serves_tuned_in_a_child(model, x):
    tuned = TunedModule(model, always(CANDIDATES["channels_last"]))
    tuned(x)

    def work():
        tuned.refresh()
        return tuned(x).tolist(), tuned.report().hits

    found, hits = in_child(work)
    torch.testing.assert_close(torch.tensor(found), answer(model, x))
    assert hits == 2


@pytest.mark.parametrize("held", ["turns", "entries", "tally", "counter"])
def test_locks_held_in_the_parent_do_not_block_the_child(model, x, held):
    tuned = TunedModule(model, always(CANDIDATES["channels_last"]))
    tuned(x)
    (entry,) = entries_of(tuned)
    lock = {
        "turns": settings.TURNS,
        "entries": tuned._entries._lock,
        "tally": tuned._tally._lock,
        "counter": entry.hits._lock,
    }[held]
    taken, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        hits = in_child(lambda: (tuned(x), tuned.refresh(), tuned(x), tuned.report().hits)[-1])
    finally:
        done.set()
        holder.join()
    assert hits == 2


def test_a_child_applies_no_more_threads_than_it_has():
    def work():
        try:
            with Threads(Threads.Parameters(2)).applied(Workload(nn.ReLU(), torch.ones(1))):
                return "applied"
        except UnsupportedError as error:
            return str(error)

    assert "2 threads may deadlock in a forked process" in in_child(work)


def test_workers_of_a_loader_go_on(wide, images):
    tuned = TunedModule(wide, always(THREADS))
    with torch.no_grad():
        tuned(images)

        def collated(rows):
            return tuned(torch.stack([row for (row,) in rows])).sum()

        loader = DataLoader(
            TensorDataset(images), 2, num_workers=1, collate_fn=collated, timeout=DEADLINE_S
        )
        assert len(list(loader)) == 2
    tuned.close()
