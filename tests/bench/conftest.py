from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from steadytorch.bench.bench_worker import SetUp
from steadytorch.bench.series import Series
from steadytorch.device.recording import Recording
from steadytorch.measure.sampler import WarmUp
from steadytorch.process.worker import WorkerFault
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

MS = 1_000_000
SET_UP = SetUp(0.5, WarmUp(5 * MS, 30, 2 * MS, 1), 200 << 20)


@pytest.fixture(scope="session")
def workload() -> Callable[[str], Workload]:
    """A workload of models.py, by the name of its factory."""
    return lambda name: load_workload(f"{Path(__file__).with_name('models.py')}:{name}")


@pytest.fixture
def no_process_left():
    """Fails the test if a process that it started is still alive at its end."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before


class Worker:
    """A fake worker process that answers from a script, one process after another.

    Args:
        script: answers by method; exceptions are raised, functions called.
    """

    def __init__(self, script: Mapping[str, Any], directory: Path) -> None:
        self._script = {"load": None, "set_up": SET_UP, "broken_off": None, **script}
        self.directory, self.killed, self._asked = directory, False, ""

    def send(self, method: str, **arguments: Any) -> None:
        self._asked, self._arguments = method, arguments

    def receive(self, deadline_s: float) -> Any:
        answer = self._script[self._asked]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            answer = answer(**self._arguments)
        return msgspec.to_builtins(answer)

    def call(self, method: str, deadline_s: float, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.receive(deadline_s)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def scripted(monkeypatch):
    """Replaces worker processes with scripts; returns the started workers."""

    def play(module, *scripts):
        started = []

        def start(handler, directory, name):
            started.append(Worker(scripts[len(started)], directory))
            return started[-1]

        monkeypatch.setattr(module, "Worker", start)
        return started

    return play


@pytest.fixture
def answer():
    """Makes workers' answers: `series` and faults."""

    def series(durations, **fields):
        defaults = {
            "stretches": [(0, len(durations))],
            "host_ns": list(durations),
            "overhead_ns": 100.0,
            "group": 1,
            "resolved": True,
            "recording": Recording(device="cpu", interval_ns=15 * MS),
        }
        return Series(durations_ns=list(durations), **{**defaults, **fields})

    return SimpleNamespace(series=series, fault=WorkerFault)
