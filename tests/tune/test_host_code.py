"""When a search compiles native host code."""

import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from scripted import Notes
from torch import nn

from steadytorch import Workload
from steadytorch.errors import UsageError
from steadytorch.native import host
from steadytorch.tune.host_code import LONG_S, RESERVE_S, compile_now, reserve_s
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session


class Compiler:
    """A fake compiler of host code that records requests."""

    def __init__(self, fault=None, rounds=0):
        self.asked, self._fault, self._rounds = [], fault, rounds

    def is_through(self, seconds):
        self._rounds -= 1
        return self._rounds < 0

    def finish(self, seconds):
        self.asked.append(("finish", seconds))
        if self._fault is not None:
            raise self._fault

    def stop(self):
        self.asked.append("stop")


class Clock(Notes):
    """A listener that records phases and counts ticks."""

    def __init__(self):
        super().__init__()
        self.phases, self.ticks = [], 0

    def phase(self, message):
        self.phases.append(message)

    def tick(self):
        self.ticks += 1


@pytest.fixture
def compiler_of(monkeypatch):
    """Replaces the compiler; returns the list of its starts."""

    def give(compiler, is_missing=True):
        began = []
        monkeypatch.setattr(host, "begin", lambda: began.append(1) or compiler)
        monkeypatch.setattr(host, "is_missing", lambda: is_missing)
        return began

    return give


@pytest.mark.parametrize(
    ("device", "budget_s", "is_missing", "kept_s"),
    [
        ("cpu", LONG_S, True, RESERVE_S),
        ("cpu", LONG_S - 1, True, 0),
        ("cpu", LONG_S, False, 0),
        ("cuda:0", LONG_S, True, 0),
    ],
)
def test_long_searches_on_a_cpu_keep_time_for_it(compiler_of, device, budget_s, is_missing, kept_s):
    compiler_of(Compiler(), is_missing)
    assert reserve_s(device, budget_s) == kept_s


def test_it_is_waited_for(compiler_of):
    compiler, clock = Compiler(rounds=3), Clock()
    compiler_of(compiler)
    compile_now(60, clock)
    assert compiler.asked == [("finish", 0), "stop"]
    assert (len(clock.phases), clock.ticks) == (1, 3)


def test_what_takes_too_long_is_given_up(compiler_of):
    compiler = Compiler(rounds=1_000_000)
    compiler_of(compiler)
    compile_now(0, Clock())
    assert compiler.asked == [("finish", 0), "stop"]


def test_an_interrupt_ends_the_compiler(compiler_of):
    class Interrupted(Clock):
        def tick(self):
            raise KeyboardInterrupt

    compiler = Compiler(rounds=3)
    compiler_of(compiler)
    with pytest.raises(KeyboardInterrupt):
        compile_now(60, Interrupted())
    assert compiler.asked == ["stop"]


def test_where_nothing_can_be_made_nothing_is_told(compiler_of):
    clock = Clock()
    compiler_of(None)
    compile_now(60, clock)
    assert clock.phases == []


@pytest.fixture
def searched(tmp_path, monkeypatch, compiler_of):
    """Runs a session with a fake search; returns the result and the number of compiler starts."""
    module = sys.modules[Session.__module__]

    def search(compiler, run, device="cuda:0", cores=16, budget_s=LONG_S):
        began = compiler_of(compiler)
        monkeypatch.setattr(module.Search, "run", lambda self: run(self._options))
        workload = Workload(nn.Linear(2, 2).eval(), torch.zeros(1, 2))
        session = Session(workload, SearchOptions(budget_s=budget_s), store=tmp_path)
        session.facts = msgspec.structs.replace(session.facts, cores_logical=cores)
        session._device = device
        monkeypatch.setattr(session, "options_that_apply", lambda: ([], {}))
        try:
            return session.search(Clock()), len(began)
        except UsageError:
            return None, len(began)

    return search


def _found(options, interrupted=False):
    return SimpleNamespace(interrupted=interrupted, budget_s=options.budget_s, chosen=())


def test_a_search_on_a_gpu_compiles_host_code_and_waits_for_it_in_the_end(searched):
    compiler = Compiler()
    result, began = searched(compiler, _found)
    assert (result.interrupted, result.budget_s, began) == (False, LONG_S, 1)
    assert compiler.asked == [("finish", 10.0), "stop"]


def test_a_search_on_a_cpu_does_it_in_time_that_it_leaves(searched):
    compiler = Compiler(rounds=2)
    result, began = searched(compiler, _found, "cpu")
    assert (result.budget_s, began) == (LONG_S - RESERVE_S, 1)
    assert compiler.asked == [("finish", 0), "stop"]


@pytest.mark.parametrize(
    ("device", "cores", "budget_s"),
    [("cpu", 16, LONG_S - 1), ("cuda:0", 2, LONG_S), ("cuda:0", None, LONG_S)],
)
def test_no_other_search_compiles_it(searched, device, cores, budget_s):
    result, began = searched(Compiler(), _found, device, cores, budget_s)
    assert (result.budget_s, began) == (budget_s, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_result_outlives_an_interruption_of_the_wait(searched, device):
    compiler = Compiler(KeyboardInterrupt())
    result, _ = searched(compiler, _found, device)
    assert not result.interrupted
    assert compiler.asked[-1] == "stop"


@pytest.mark.parametrize(("device", "asked"), [("cpu", []), ("cuda:0", ["stop"])])
def test_nobody_waits_for_it_after_an_interrupted_or_failed_search(searched, device, asked):
    def fail(options):
        raise UsageError("the workload fails")

    for run in (lambda options: _found(options, interrupted=True), fail):
        compiler = Compiler()
        searched(compiler, run, device)
        assert compiler.asked == asked
