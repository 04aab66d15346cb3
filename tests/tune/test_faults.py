"""Faulty candidates of every kind, in real worker processes."""

import gc
import os
import signal
import sys
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest
import torch
from faulty import Slow, spec

from steadytorch import transforms
from steadytorch.bench.bench_worker import save_payload
from steadytorch.process.fork_server import ForkServer
from steadytorch.process.worker import Worker
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.search import Search
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.setup_scheduler import NullListener, SetupScheduler
from steadytorch.workload.workload import Workload

QUICK = TransformSpec("quick")
SET_UP = "set-up: "
ENDS = {
    "exits": SET_UP + "process exited with status 7",
    "segfaults": SET_UP + "segmentation fault (SIGSEGV)",
    "raises": SET_UP + "ArithmeticError: this cannot be applied",
    "exhausts": SET_UP + "out of memory",
    "nan": "output 0 holds NaN",
    "wrong": "relative error 1.0e-03 exceeds ",
    "shape": "output 0 has shape (1, 8), expected (2, 8)",
    "dtype": "output 0 is float64, expected float32",
    "nests": "nests its outputs in other containers",
    "writes": "writes to its inputs",
    "aliases": "two calls return the same memory, which is not the model's",
    "dies_late": "process exited with status 9",
}
ABRUPT = ("exits", "segfaults", "raises", "exhausts", "dies_late")


class Launcher:
    """Starts workers that register the transforms of faulty.py."""

    def __init__(self, directory, memory_limit_bytes=None, server=None):
        self._directory, self._limit, self._server = directory, memory_limit_bytes, server
        self.started = []

    def __call__(self, name, imports):
        limit, server = self._limit, self._server
        worker = Worker("faulty:FaultyHandler", self._directory, name, {}, limit, server=server)
        self.started.append(worker)
        return worker


def _workload():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Workload(Slow().eval(), torch.randn(2, 8))


def _state_of_this_process():
    gc.collect()
    process = psutil.Process()
    return SimpleNamespace(
        children=set(process.children(recursive=True)),
        descriptors=process.num_fds(),
        settings=transforms.ambient(),
        random=torch.get_rng_state().tolist(),
        signals=[signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        directory=os.getcwd(),
        environment=dict(os.environ),
    )


def _left(started):
    return [worker.pid for worker in started if psutil.pid_exists(worker.pid)]


@pytest.fixture(scope="module")
def server(faulty_transforms, tmp_path_factory):
    """Forks the workers, as that of a real search does."""
    with closing(ForkServer(tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture(
    scope="module",
    params=[ABRUPT, pytest.param(tuple(ENDS), marks=pytest.mark.slow)],
    ids=["abrupt", "all"],
)
def searched(request, server, tmp_path_factory):
    """One search over faults and one honest candidate, and this process before and after."""
    directory = tmp_path_factory.mktemp("search")
    workload = _workload()
    save_payload(workload, directory)
    before = _state_of_this_process()
    launcher = Launcher(directory, server=server)
    options = SearchOptions(budget_s=600)
    search = Search(
        workload,
        SetupScheduler(launcher, "cpu", before.settings, options, NullListener()),
        available=[*(spec(kind) for kind in request.param), QUICK],
        not_applicable={},
        options=options,
        watcher=NullListener(),
        slots=3,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[Search.__module__], "ENOUGH", 0.0)  # all are tried
        result = search.run()
    return SimpleNamespace(
        result=result,
        kinds=request.param,
        before=before,
        after=_state_of_this_process(),
        started=launcher.started,
    )


def test_each_fault_is_told_with_its_reason(searched):
    trials = {trial.transforms: trial for trial in searched.result.candidates}
    for kind in searched.kinds:
        trial = trials[(spec(kind),)]
        assert trial.status == ("failed" if kind == "raises" else "rejected")
        assert trial.reason.startswith(ENDS[kind])


def test_the_honest_candidate_wins_all_the_same(searched):
    assert searched.result.chosen == (QUICK,)
    assert searched.result.speedup.verdict == "faster"
    assert not searched.result.interrupted


def test_one_out_of_memory_beside_others_was_tried_twice(searched):
    # The untouched workload and its reference, each candidate once, and one retry.
    assert len(searched.started) == 2 + len(searched.kinds) + 1 + 1


def test_no_worker_is_left(searched):
    assert searched.after.children == searched.before.children
    assert _left(searched.started) == []


def test_this_process_is_as_it_was(searched):
    assert vars(searched.after) == vars(searched.before)


@pytest.fixture
def prepare(faulty_transforms, tmp_path, no_process_left):
    """Prepares candidates in real workers within a deadline, and ends the workers."""
    workload = _workload()
    save_payload(workload, tmp_path)
    ended = []

    def run(candidates, deadline_s, **options):
        launcher = Launcher(tmp_path, **options)
        scheduler = SetupScheduler(launcher, "cpu", {}, SearchOptions(), NullListener())
        ended.append(scheduler.kill_all)
        scheduler.baseline(lambda: 120.0)
        return scheduler.prepare(candidates, len(candidates), deadline_s, 1)

    yield run
    for end in ended:
        end()


@pytest.mark.slow
def test_candidates_that_hang_or_stop_are_killed_at_the_deadline_and_others_go_on(prepare):
    trials = {t.candidate: t for t in prepare([(spec("hangs"),), (spec("stops"),), (QUICK,)], 10.0)}
    for kind in ("hangs", "stops"):
        trial = trials[(spec(kind),)]
        assert trial.status == "rejected"
        assert trial.reason == "set-up: no answer within 10 s, killed"
        assert not psutil.pid_exists(trial.worker.pid)
    assert trials[(QUICK,)].ok
