from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from steadytorch.sweeps.leases import POLLS, Leases

TIMEOUT_S = 30.0
POLL_S = TIMEOUT_S / POLLS


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leases(tmp_path, clock):
    return Leases(tmp_path, "here:1", TIMEOUT_S, clock)


def look(leases, clock, seconds, beat=lambda: None, step=POLL_S):
    """Looks at the lease of item `a` for some time; returns what it claims."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step
        beat()
        claimed = leases.claim("a", leases.held().get("a"))
        if claimed is not None:
            return claimed
    return None


def foreign(folder, number=0):
    path = folder / f"a.{number}.lease"
    path.write_text("there:2")
    return path


def touched(path):
    """Makes the function of a heartbeat; its times only have to differ."""
    times = iter(range(1, 10**6))
    return lambda: os.utime(path, (0, next(times)))


def test_one_of_many_claims_a_free_item(tmp_path):
    workers = [Leases(tmp_path, f"w:{number}") for number in range(5)]
    claims = [each.claim("a", None) for each in workers]
    assert [claim is not None for claim in claims] == [True, False, False, False, False]
    held = workers[3].held()
    assert held.keys() == {"a"}
    assert workers[3].holder(held["a"]) == "w:0"


def test_a_lease_ends_with_its_block(tmp_path, leases):
    claimed = leases.claim("a", None)
    with claimed:
        assert leases.held()
    assert not list(tmp_path.iterdir())


def test_a_lease_without_heartbeat_is_taken_over_after_the_timeout(tmp_path, leases, clock):
    foreign(tmp_path)
    assert look(leases, clock, TIMEOUT_S - POLL_S) is None
    claimed = look(leases, clock, 3 * POLL_S)
    assert claimed is not None
    assert leases.holder(leases.held()["a"]) == "here:1"
    with claimed:
        pass
    assert not list(tmp_path.iterdir())


def test_a_lease_with_heartbeats_is_left_alone(tmp_path, leases, clock):
    assert look(leases, clock, 20 * TIMEOUT_S, touched(foreign(tmp_path))) is None


@pytest.mark.parametrize("jump_s", [-(10**9), 10**9])
def test_the_time_of_a_lease_itself_says_nothing(tmp_path, leases, clock, jump_s):
    """Its clock is a year off, or jumps between two heartbeats."""
    path = foreign(tmp_path)
    os.utime(path, (time.time() + jump_s, time.time() + jump_s))
    assert look(leases, clock, TIMEOUT_S / 2) is None
    os.utime(path)
    assert look(leases, clock, TIMEOUT_S / 2) is None
    assert look(leases, clock, TIMEOUT_S) is not None


def test_a_worker_that_was_suspended_looks_again(tmp_path, leases, clock):
    foreign(tmp_path)
    assert look(leases, clock, 3 * POLL_S) is None
    assert look(leases, clock, 1, step=100 * TIMEOUT_S) is None


def test_one_of_many_takes_over(tmp_path, clock):
    foreign(tmp_path)
    watching = [Leases(tmp_path, f"w:{number}", TIMEOUT_S, clock) for number in range(4)]
    claimed = []
    while not claimed:
        clock.now += POLL_S
        held = watching[0].held()["a"]  # all have looked before one of them claims
        claimed = [lease for each in watching if (lease := each.claim("a", held))]
    assert len(claimed) == 1
    assert claimed[0].path.name == "a.1.lease"


def test_a_holder_that_was_taken_over_leaves_the_new_lease_alone(tmp_path, leases, clock):
    slow = Leases(tmp_path, "slow:1").claim("a", None)
    assert look(leases, clock, 2 * TIMEOUT_S) is not None
    with slow:
        pass
    assert leases.holder(leases.held()["a"]) == "here:1"


def test_a_lease_that_is_gone_is_not_dead(tmp_path, leases, clock):
    path = foreign(tmp_path)
    held = leases.held()["a"]
    path.unlink()
    assert leases.claim("a", held) is None


def test_other_files_are_no_leases(tmp_path, leases):
    for name in ("a.json", "a.lease", "A.0.lease", ".a.0.lease", "a.0.lease.tmp", "log"):
        (tmp_path / name).touch()
    assert leases.held() == {}


def test_the_heartbeat_moves_the_time(tmp_path):
    claimed = Leases(tmp_path, "here:1", 0.1).claim("a", None)
    os.utime(claimed.path, (1, 1))
    with claimed:
        end = time.monotonic() + 30
        while claimed.path.stat().st_mtime < 2:
            assert time.monotonic() < end
            time.sleep(0.01)


class Sharing(RuleBasedStateMachine):
    """Three workers and one item: while a holder beats, no other one claims."""

    def __init__(self):
        super().__init__()
        self.folder = next(self.folders)
        self.clock = Clock()
        self.workers = [Leases(self.folder, f"w:{n}", TIMEOUT_S, self.clock) for n in range(3)]
        self.holder = self.lease = None
        self.beats = 0

    @rule(worker=st.integers(0, 2), polls=st.integers(0, 3))
    def claim(self, worker, polls):
        self.clock.now += polls * POLL_S
        if self.lease is not None:
            self.beats += 1
            os.utime(self.lease.path, (0, self.beats))
        leases = self.workers[worker]
        claimed = leases.claim("a", leases.held().get("a"))
        assert claimed is None or self.lease is None
        if claimed is not None:
            self.holder, self.lease = worker, claimed

    @rule()
    def die(self):
        self.holder = self.lease = None

    @rule()
    def finish(self):
        if self.lease is not None:
            with self.lease:
                pass
            self.holder = self.lease = None
            assert not self.workers[0].held()

    @invariant()
    def the_holder_is_named(self):
        if self.lease is not None:
            held = self.workers[0].held()["a"]
            assert self.workers[0].holder(held) == f"w:{self.holder}"


def test_no_two_workers_hold_an_item(tmp_path):
    def folders():
        for number in range(10**6):
            folder = tmp_path / str(number)
            folder.mkdir()
            yield folder

    Sharing.folders = folders()
    run_state_machine_as_test(Sharing)


@given(timeout_s=st.floats(0.1, 1e4))
def test_a_poll_is_shorter_than_the_timeout(timeout_s):
    assert Leases(None, "w", timeout_s).poll_s < timeout_s / 2
