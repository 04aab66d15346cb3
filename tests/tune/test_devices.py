"""One search on several devices."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from itertools import combinations
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from faulty import Slow
from scripted import DETERMINISTIC, EAGER, FOLD, MS, Act, Notes, Stage, make_search

from steadytorch import Workload, transforms, tune
from steadytorch.device.facts import load_facts
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import trial
from steadytorch.tune.candidate_pool import CandidatePool
from steadytorch.tune.devices import Devices, choose_devices, devices_of_ranks
from steadytorch.tune.search import Search
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.tune.setup_scheduler import NullListener

QUICK = TransformSpec("quick")
KINDS = [TransformSpec("faulty", (("kind", kind),)) for kind in ("wrong", "nan", "raises")]
A, B, C = "cuda:0", "cuda:1", "cuda:2"
OPTIONS = [EAGER, DETERMINISTIC, FOLD]
ALONE = (DETERMINISTIC,)
"""Is set up first on the second device."""


def acts(eager=9.0, deterministic=8.0, fold=9.5):
    """Acts of single transforms; two together are nearly as fast as the faster one alone."""
    times = {EAGER: eager, DETERMINISTIC: deterministic, FOLD: fold}
    found = {(spec,): time for spec, time in times.items()}
    for pair in combinations(times, 2):
        found[transforms.order(pair)] = min(times[spec] for spec in pair) + 0.2
    return {candidate: Act(time * MS) for candidate, time in found.items()}


def devices_of(stage, candidate):
    return [device for device, placed in stage.placed if placed == candidate]


# -- scripted searches --------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("slowness", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("winner", ["eager", "deterministic", "fold"])
def test_two_devices_find_the_winner_of_one(winner, slowness):
    # Combinations are behind, so that variations of the untouched workload are tried on both.
    ordered = transforms.order(OPTIONS)
    known = {c: Act(12 * MS) for size in (2, 3) for c in combinations(ordered, size)}
    known |= acts(**{winner: 6.0})
    one, two = Stage(known), Stage(known, slowness={B: slowness})
    alone = make_search(one, OPTIONS, device=A).run()
    both = make_search(two, OPTIONS, device=A, others=[B]).run()
    assert both.chosen == alone.chosen
    assert both.speedup.estimate == pytest.approx(alone.speedup.estimate, rel=0.01)
    (home,) = devices_of(two, both.chosen)
    untouched_ns = 10 * MS * (slowness if home == B else 1.0)
    assert both.baseline.median_ns == pytest.approx(untouched_ns, rel=0.01)
    assert both.devices == ((A, B) if home == A else (B, A))
    assert not both.devices_left_out
    assert {device for device, _ in two.placed} == {A, B}


def test_each_device_times_an_untouched_workload_of_its_own():
    stage = Stage(acts())
    make_search(stage, OPTIONS, device=A, others=[B]).run()
    assert sorted(devices_of(stage, ())) == [A, B]


@pytest.mark.parametrize("slowness", [1.0, 1.5])
def test_a_leader_on_the_second_device_is_confirmed_there(monkeypatch, slowness):
    monkeypatch.setattr(sys.modules[Search.__module__], "ENOUGH", 0.0)  # all are tried
    stage = Stage(acts() | {ALONE: Act(6 * MS)}, slowness={B: slowness})
    result = make_search(stage, OPTIONS, device=A, others=[B]).run()
    assert (result.chosen, result.devices) == (ALONE, (B, A))
    assert devices_of(stage, ALONE) == [B]
    assert set(result.timed_on.values()) == {A}
    assert str(ALONE[0]) not in result.timed_on
    timed = [t for t in result.candidates if t.samples]
    assert timed[0].transforms == ()
    assert timed[0].median_ns == pytest.approx(10 * MS * slowness, rel=0.01)
    assert result.winner.median_ns == pytest.approx(6 * MS * slowness, rel=0.01)
    assert result.speedup.estimate == pytest.approx(10 / 6, rel=0.02)


def test_a_winner_that_dies_in_its_confirmation_leaves_one_of_another_device(monkeypatch):
    monkeypatch.setattr(sys.modules[Search.__module__], "ENOUGH", 0.0)
    known = acts(eager=6.3) | {ALONE: Act(6 * MS, blocks_until_death=18)}
    stage, notes = Stage(known), Notes()
    result = make_search(stage, OPTIONS, device=A, others=[B], watcher=notes).run()
    assert any("confirming cudnn_deterministic" in phase for phase in notes.phases)
    assert (result.chosen, result.devices) == ((EAGER,), (A, B))
    assert result.baseline.median_ns == pytest.approx(10 * MS, rel=0.01)


def test_a_device_whose_untouched_workload_dies_is_left_out_and_its_candidates_move():
    stage = Stage(acts() | {ALONE: Act(6 * MS)}, deaths={B: 8})
    result = make_search(stage, OPTIONS, device=A, others=[B]).run()
    assert result.chosen == ALONE
    assert result.devices == (A,)
    (why,) = result.devices_left_out.values()
    assert why.startswith("the untouched workload failed: segmentation fault")
    assert devices_of(stage, ALONE) == [B, A]


def test_the_first_devices_untouched_workload_ends_the_search_if_it_dies():
    search = make_search(Stage(acts(), deaths={A: 8}), OPTIONS, device=A, others=[B])
    with pytest.raises(UsageError, match="the untouched workload failed during timing"):
        search.run()


def test_a_candidate_that_fails_on_the_second_device_costs_itself_only():
    stage = Stage(acts(fold=6.0))
    stage.acts[ALONE].blocks_until_death = 2
    result = make_search(stage, OPTIONS, device=A, others=[B]).run()
    assert (result.chosen, set(result.devices)) == ((FOLD,), {A, B})
    assert devices_of(stage, ALONE) == [B]
    (dead,) = [t for t in result.candidates if t.transforms == ALONE]
    assert dead.status == "rejected"


@pytest.mark.parametrize("at", [3, 20, 60, 120])
def test_ctrl_c_keeps_what_was_found(at):
    stage = Stage(acts(), interrupt_at=at)
    result = make_search(stage, OPTIONS, device=A, others=[B]).run()
    assert result.interrupted
    assert not any(worker.alive for worker in stage.workers)


def test_a_small_budget_still_gives_a_claim():
    stage = Stage(acts(fold=6.0))
    options = SearchOptions(budget_s=25)
    result = make_search(stage, OPTIONS, options, device=A, others=[B]).run()
    assert not result.interrupted
    assert result.baseline.median_ns == pytest.approx(10 * MS, rel=0.01)
    assert result.seconds < 1.3 * 25


def test_three_devices_repeat_the_same_search():
    def run():
        result = make_search(Stage(acts(fold=7.0)), OPTIONS, device=A, others=[B, C]).run()
        return [t.transforms for t in result.candidates], result.winner, result.timed_on

    assert run() == run()


# -- real workers -------------------------------------------------------------------------------


@pytest.fixture
def search(faulty_transforms, tmp_path, monkeypatch, no_process_left):
    """Runs a real search on logical devices that are all the CPU."""
    monkeypatch.setattr(trial, "HANDLER", "faulty:FaultyHandler")
    monkeypatch.setattr(Session, "options_that_apply", lambda self: ([QUICK, *KINDS], {}))

    def run(names, watcher=None, budget_s=600.0):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            workload = Workload(Slow().eval(), torch.randn(2, 8))
        session = Session(
            workload,
            SearchOptions(budget_s=budget_s),
            store=tmp_path / "store",
            devices=Devices(tuple(names), {}, ()),
            runs_on=dict.fromkeys(names, "cpu"),
        )
        return session.search(watcher or NullListener())

    return run


@pytest.mark.slow
def test_real_workers_on_two_devices_find_the_honest_candidate(search, monkeypatch):
    monkeypatch.setattr(Search, "_is_hopeless", lambda *_: False)
    result = search(["first", "second"])
    assert (result.chosen, set(result.devices)) == ((QUICK,), {"first", "second"})
    assert result.speedup.verdict == "faster"
    statuses = {str(t.transforms[0]): t.status for t in result.candidates if t.transforms}
    assert sorted(statuses.values()) == ["failed", "ok", "rejected", "rejected"]


class _AtFirstVerified(NullListener):
    """Acts once when the first candidate is verified."""

    def __init__(self, act):
        self._act, self._done = act, False

    def trial(self, label, state, detail=""):
        if state == "verified" and label != "untouched" and not self._done:
            self._done = True
            self._act()


@pytest.mark.slow
def test_a_killed_worker_of_the_second_device_leaves_the_first(search, monkeypatch):
    take, killed = CandidatePool._take_blocks, []

    def kill_first(self, orders):
        busy = [t for t in self.alive() if t.device == "second"]
        if busy and not killed:
            killed.extend(t.candidate for t in busy)
            worker = self.further["second"].worker
            os.kill(worker.pid, signal.SIGKILL)
            while worker.alive:
                time.sleep(0.01)
        take(self, orders)

    monkeypatch.setattr(CandidatePool, "_take_blocks", kill_first)
    monkeypatch.setattr(Session, "options_that_apply", lambda self: ([EAGER, QUICK], {}))
    monkeypatch.setattr(Search, "_is_hopeless", lambda *_: False)
    result = search(["first", "second"])
    assert QUICK in result.chosen
    assert killed
    assert result.devices == ("first",)
    assert "killed (SIGKILL)" in result.devices_left_out["second"]
    assert set(killed) <= {t.transforms for t in result.candidates}


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_of_both_devices(search):
    def interrupt():
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()

    result = search(["first", "second"], _AtFirstVerified(interrupt))
    assert result.interrupted
    assert not psutil.Process().children(recursive=True)


# -- the choice of devices ----------------------------------------------------------------------

GPU = msgspec.structs.replace(
    load_facts("cpu"), device="cuda", name="H100", compute_capability="9.0", memory_bytes=80 << 30
)


def choose(request, device=None, facts=None, busy=None, own="cuda:0"):
    facts, busy = facts or {}, busy or {}
    known = [f"cuda:{index}" for index in range(4)]

    def resolve(name):
        if name not in known:
            raise UnsupportedError(f"device {name!r} is not available")
        return name

    return choose_devices(
        request,
        device,
        own,
        count=lambda: 4,
        facts=lambda name: facts.get(name, GPU),
        others=lambda index: busy.get(f"cuda:{index}", 0),
        resolve=resolve,
    )


@pytest.mark.parametrize("request_", ["cuda:1,cuda:0", ["cuda:1", "cuda:0"], "cuda:1, cuda"])
def test_named_devices_keep_their_order(request_):
    assert choose(request_) == (("cuda:1", "cuda:0"), {}, ())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("cpu,cpu", "needs GPUs"),
        ("cpu", "needs GPUs"),
        ("cuda:0,cuda:0", "device cuda:0 is given twice"),
        ("cuda,cuda:0", "device cuda:0 is given twice"),
        ("cuda:0,tpu", "unknown device 'tpu'"),
        ("", "unknown device ''"),
        ([], "devices is empty"),
        ([0, 1], "takes names such as cuda:0, got 0"),
    ],
)
def test_wrong_devices_are_refused_in_one_line(request_, message):
    with pytest.raises(UsageError, match=message) as caught:
        choose(request_)
    assert "\n" not in str(caught.value)


def test_a_missing_device_is_refused():
    with pytest.raises(UnsupportedError, match="cuda:7"):
        choose("cuda:0,cuda:7")


def test_device_and_devices_exclude_each_other():
    with pytest.raises(UsageError, match="pass one of them"):
        choose("cuda:0,cuda:1", device="cuda:0")


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("name", "A100", r"name \(H100 and A100\)"),
        ("compute_capability", "8.0", "compute capability"),
        ("memory_bytes", 40 << 30, r"memory \(80.0 GiB and 40.0 GiB\)"),
        ("mig_profile", "1g.10gb", "MIG profile"),
    ],
)
def test_unequal_devices_are_refused(field, value, shown):
    other = {"cuda:1": msgspec.structs.replace(GPU, **{field: value})}
    with pytest.raises(UsageError, match=f"cuda:0 and cuda:1 differ in {shown}"):
        choose("cuda:0,cuda:1", facts=other)


def test_a_busy_device_is_used_if_named_with_a_note():
    found = choose("cuda:0,cuda:1", busy={"cuda:1": 2})
    assert found.names == ("cuda:0", "cuda:1")
    assert found.notes == ("cuda:1 is busy (2 other processes): timings may be disturbed",)


def test_all_takes_the_idle_devices_of_one_kind_from_the_workloads_on():
    other = {"cuda:0": msgspec.structs.replace(GPU, name="A100")}
    found = choose("all", device="cuda:2", facts=other, busy={"cuda:3": 1})
    assert found.names == ("cuda:2", "cuda:1")
    assert found.left_out == {
        "cuda:0": "differs from cuda:2 in name (H100 and A100)",
        "cuda:3": "busy: 1 other process",
    }
    assert found.notes == ("cuda:3 is busy (1 other process): left out",)


def test_all_takes_the_workloads_device_if_every_device_is_busy():
    found = choose("all", busy={f"cuda:{index}": 1 for index in range(4)})
    assert found.names == ("cuda:0",)
    assert "using cuda:0 alone" in found.notes[0]


def test_ranks_share_the_gpus_of_one_kind_that_the_first_rank_sees():
    uuids = {"cuda:0": "a", "cuda:1": "b", "cuda:2": "c", "cuda:3": "d"}
    found = devices_of_ranks(
        "cuda:1",
        ("b", "a", "d", "of another machine"),
        count=lambda: 4,
        facts=lambda name: {"cuda:3": msgspec.structs.replace(GPU, name="A100")}.get(name, GPU),
        uuid=uuids.__getitem__,
    )
    assert found == Devices(("cuda:1", "cuda:0"), {}, ())


def test_a_search_on_a_cpu_has_no_gpus_to_share(caplog):
    session = Session(Workload(torch.nn.Linear(2, 2), torch.zeros(1, 2)), SearchOptions())
    assert session.gpu == ""
    with caplog.at_level("INFO", "steadytorch"):
        session.share(("a", "b"))
    assert not caplog.records


def test_all_is_refused_for_a_workload_on_a_cpu():
    with pytest.raises(UsageError, match="needs GPUs"):
        choose_devices("all", None, "cpu", resolve=lambda name: name)


def test_tune_refuses_cpus(tmp_path):
    workload = SimpleNamespace(model=torch.nn.Linear(2, 2), x=torch.zeros(1, 2))
    with pytest.raises(UsageError, match="needs GPUs"):
        tune((workload.model, workload.x), devices=["cpu", "cpu"], store=tmp_path)
