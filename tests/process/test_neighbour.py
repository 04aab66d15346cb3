"""A busy process beside a timed one."""

from __future__ import annotations

import time

import psutil
import pytest

from steadytorch.process.neighbour import Neighbour


@pytest.fixture
def neighbour():
    made = Neighbour()
    yield made
    made.close()


def child_of(parent):
    (child,) = (each for each in parent.children() if "select" in " ".join(each.cmdline()))
    return child


def computes(child, so_far):
    """Waits until it has computed for longer than so far."""
    for _ in range(1000):
        if sum(child.cpu_times()[:2]) > so_far:
            return True
        time.sleep(0.01)
    return False


def test_it_computes_within_its_context_and_ends_when_closed(neighbour):
    with neighbour:
        child = child_of(psutil.Process())
        assert computes(child, 0.05)
    with neighbour:  # the same process again
        assert child_of(psutil.Process()) == child
        assert computes(child, sum(child.cpu_times()[:2]) + 0.05)
    neighbour.close()
    assert not child.is_running()


def test_it_waits_outside_its_context(neighbour):
    with neighbour:
        child = child_of(psutil.Process())
        assert computes(child, 0.0)
    for _ in range(1000):
        if child.status() == psutil.STATUS_SLEEPING:
            return
        time.sleep(0.01)
    pytest.fail(f"it is {child.status()}")


def test_it_ends_with_its_pipe(neighbour):
    with neighbour:
        child = child_of(psutil.Process())
    neighbour._process.stdin.close()
    assert psutil.wait_procs([child], timeout=10)[0] == [child]


def test_an_unwanted_one_starts_nothing():
    before = psutil.Process().children()
    with Neighbour(wanted=False):
        assert psutil.Process().children() == before
