"""Setting up options in worker processes."""

from __future__ import annotations

import pytest
import rival_arms
from rival_arms import OURS, REFERENCE, start_all

from steadytorch.process.worker import Fault, WorkerFault

SET_UP = {"setup_s": 1.0, "peak_memory_bytes": 1, "error": 0.0, "fault": None}


class Crowded:
    """A worker process; those named in `failing` run out of memory when they are prepared."""

    started: list
    failing: set

    def __init__(self, handler, directory, name, environment=None):
        self.name, self.environment, self.alive = name, environment, True
        Crowded.started.append(self)

    def send(self, method, **arguments):
        self.method = method

    def receive(self, deadline_s):
        if self.method == "prepare" and self.name in Crowded.failing:
            raise WorkerFault(Fault.OUT_OF_MEMORY, "out of memory")
        return SET_UP if self.method == "check" else None

    def ready(self):
        return True

    def kill(self):
        self.alive = False


@pytest.fixture
def start(monkeypatch, tmp_path):
    monkeypatch.setattr(rival_arms, "Worker", Crowded)
    monkeypatch.setattr(rival_arms, "wait_any", lambda workers, seconds: None)

    def started(*failing):
        Crowded.started, Crowded.failing = [], set(failing)
        told = []
        given = {OURS: "plan"}, ["eager", "compile"], "cuda", tmp_path, 60.0
        return start_all(*given, told.append), told

    return started


def test_options_are_ready_and_the_reference_has_ended(start):
    arms, told = start()
    assert [(arm.option, arm.stage) for arm in arms] == [
        (OURS, "ready"),
        ("eager", "ready"),
        ("compile", "ready"),
    ]
    assert (
        told == [f"{name}: ready, 1.0 s" for name in (OURS, "eager", "compile")] or len(told) == 4
    )
    assert [worker.name for worker in Crowded.started if not worker.alive] == [REFERENCE]


def test_what_runs_out_of_memory_is_set_up_again_when_nothing_else_is(start):
    arms, told = start("arm-1", "arm-2", "arm-2-again")
    assert [arm.stage for arm in arms] == ["ready", "ready", "failed"]
    assert arms[2].failed == "out of memory"
    assert "eager: out of memory" in told
    assert told[-2:] == ["eager: ready, 1.0 s", "compile: out of memory"]
    alive = [worker for worker in Crowded.started if worker.alive]
    assert [worker.name for worker in alive] == ["arm-0", "arm-1-again"]
    caches = [worker.environment["TORCHINDUCTOR_CACHE_DIR"] for worker in Crowded.started[1:]]
    assert len(set(caches)) == len(caches)  # a warm cache would shorten the second set-up
