"""When the processes of a search start, and the first requests."""

import pytest
from scripted import DETERMINISTIC, EAGER, FOLD, Notes, ScriptedWorker, Stage

from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import setup_scheduler
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.setup_scheduler import SetupScheduler

COMPILED = TransformSpec("compile", (("mode", "default"), ("freezing", True)))


def test_processes_started_early_load_nothing_until_a_candidate_needs_them():
    stage, launched = Stage(), []

    def launch(name):
        launched.append((name, len(stage.events)))
        return stage(name)

    scheduler = SetupScheduler(launch, "cpu", {}, SearchOptions(), Notes(), early=2)
    scheduler.baseline(lambda: 60.0)
    assert launched == [("reference", 0), ("trial-1", 0), ("trial-2", 0), ("trial-3", 0)]
    assert [method for method, _ in stage.events].count("load") == 2
    trials = scheduler.prepare([(EAGER,), (DETERMINISTIC,), (FOLD,)], 3, 60.0, 1)
    assert [trial.worker.name for trial in trials] == ["trial-2", "trial-3", "trial-4"]
    assert [method for method, _ in stage.events].count("load") == 5
    assert all(trial.ok for trial in trials)


def test_those_that_no_candidate_needs_end_with_the_others():
    stage = Stage()
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), Notes(), early=2)
    scheduler.baseline(lambda: 60.0)
    scheduler.kill_all()
    assert len(stage.workers) == 4
    assert not any(worker.alive for worker in stage.workers)


def test_another_takes_the_place_of_one_that_died_while_it_waited():
    stage = Stage()
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), Notes(), early=2)
    scheduler.baseline(lambda: 60.0)
    stage.workers[2].alive = False
    trials = scheduler.prepare([(EAGER,), (DETERMINISTIC,)], 2, 60.0, 1)
    assert [trial.worker.name for trial in trials] == ["trial-3", "trial-4"]
    assert all(trial.ok for trial in trials)


def test_processes_start_before_the_workload_is_there_for_them():
    stage = Stage()
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), Notes(), early=2)
    scheduler.start()
    names = [worker.name for worker in stage.workers]
    assert names == ["reference", "trial-1", "trial-2", "trial-3"]
    assert stage.exchanges == 0
    baseline = scheduler.baseline(lambda: 60.0)
    assert [worker.name for worker in stage.workers] == names
    assert baseline.worker.name == "trial-1"


@pytest.mark.parametrize(
    ("device", "early", "beside"), [("cuda:0", 2, True), ("cuda:0", 0, False), ("cpu", 2, False)]
)
def test_the_reference_is_made_beside_the_untouched_workload_where_they_share_no_core(
    device, early, beside
):
    asked, send = [], ScriptedWorker.send

    def noted(self, method, **arguments):
        asked.append((self.name, method))
        send(self, method, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedWorker, "send", noted)
        scheduler = SetupScheduler(Stage(), device, {}, SearchOptions(), Notes(), early=early)
        scheduler.baseline(lambda: 60.0)
    begun = [method for _, method in asked]
    assert (begun.index("reference") < begun.index("set_up")) is beside
    assert asked[-2:] == [("reference", "explained"), ("trial-1", "characterise")]


@pytest.mark.parametrize(
    ("device", "slow", "waiting"), [("cuda", EAGER, 0), ("cuda", COMPILED, 2), ("cpu", COMPILED, 0)]
)
def test_while_a_compiler_works_processes_start_for_what_comes_next(device, slow, waiting):
    stage = Stage()
    scheduler = SetupScheduler(stage, device, {}, SearchOptions(), Notes(), early=2)
    scheduler.baseline(lambda: 60.0)
    scheduler.prepare([(slow,), (DETERMINISTIC,)], 2, 60.0, 1)
    assert len(stage.workers) == 4 + waiting
    (trial,) = scheduler.prepare([(FOLD,)], 2, 60.0, 1)
    assert trial.worker is stage.workers[4]
    assert len(stage.workers) == max(5, 4 + waiting)


def test_what_was_set_up_before_the_reference_is_verified_after_it(monkeypatch):
    monkeypatch.setattr(setup_scheduler, "wait_any", lambda workers, seconds: None)
    stage, looks = Stage(), []
    ready = ScriptedWorker.ready

    def slow(worker):
        if worker.name == "reference":
            looks.append(worker)
            return len(looks) > 20
        return ready(worker)

    monkeypatch.setattr(ScriptedWorker, "ready", slow)
    scheduler = SetupScheduler(stage, "cuda", {}, SearchOptions(), Notes(), early=2)
    scheduler.begin([(COMPILED,)], 2, 60.0)
    scheduler.baseline(lambda: 60.0)
    made = stage.events.index(("set_up", (COMPILED,)))
    assert made < [method for method, _ in stage.events].index("reference")
    (trial,) = scheduler.prepare([], 2, 60.0, 1)
    assert trial.ok
    assert trial.verification.error is not None


@pytest.mark.parametrize(("device", "makes_way"), [("cpu", True), ("cuda", False)])
def test_on_a_cpu_a_compiler_makes_way_for_a_model_that_runs(monkeypatch, device, makes_way):
    paused = []
    monkeypatch.setattr(ScriptedWorker, "pause", lambda worker: paused.append(worker.name))
    monkeypatch.setattr(setup_scheduler, "wait_any", lambda workers, seconds: None)
    scheduler = SetupScheduler(Stage(), device, {}, SearchOptions(), Notes(), early=2)
    scheduler.baseline(lambda: 60.0)
    paused.clear()
    scheduler.begin([(COMPILED,), (EAGER,)], 2, 60.0)
    compiled, quick = scheduler.prepare([], 2, 60.0, 1)
    assert (compiled.ok, quick.ok) == (True, True)
    assert set(paused) == ({compiled.worker.name} if makes_way else set())


def test_a_process_for_the_reference_that_died_while_it_waited_is_replaced():
    stage = Stage()
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), Notes())
    scheduler.start()
    stage.workers[0].alive = False
    scheduler.baseline(lambda: 60.0)
    assert [worker.name for worker in stage.workers] == ["reference", "trial-1", "reference"]
    assert scheduler.reference.precision == "float64"


@pytest.mark.parametrize(("device", "early"), [("cuda", 2), ("cpu", 0)])
def test_what_is_asked_for_has_the_time_that_was_left_then(device, early):
    stage, asked, receive = Stage(), [], ScriptedWorker.receive

    def noted(self, deadline_s):
        asked.append((self._pending[0], deadline_s))
        return receive(self, deadline_s)

    def slow(self, candidate):
        stage.seconds += 20.0
        return set_up(self, candidate)

    set_up = ScriptedWorker._set_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedWorker, "receive", noted)
        patch.setattr(ScriptedWorker, "_set_up", slow)
        scheduler = SetupScheduler(stage, device, {}, SearchOptions(), Notes(), early=early)
        scheduler.baseline(lambda: 60.0 - stage.seconds)
    given = dict(reversed(asked))
    assert given["load"] == 60.0
    assert given["reference"] > 55.0 if early else given["reference"] < 40.0
