"""When the processes of a search start, and the first requests."""

import pytest
from scripted import EAGER, Notes, ScriptedWorker, Stage

from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import setup_scheduler
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.setup_scheduler import COMPILER, SetupScheduler

COMPILED = TransformSpec("compile", (("mode", "default"), ("freezing", True)))


def test_the_first_processes_start_before_the_workload_is_there_for_them():
    stage = Stage()
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), Notes())
    scheduler.start()
    names = [worker.name for worker in stage.workers]
    assert names == ["reference", "trial-1"]
    assert stage.exchanges == 0
    baseline = scheduler.baseline(lambda: 60.0)
    assert [worker.name for worker in stage.workers] == names
    assert baseline.worker.name == "trial-1"


def test_a_candidate_that_begins_first_leaves_the_first_process_to_the_untouched_workload():
    stage = Stage()
    scheduler = SetupScheduler(stage, "cuda", {}, SearchOptions(), Notes())
    scheduler.start()
    scheduler.begin([(EAGER,)], 2, 60.0)
    (early,) = scheduler._begin_waiting()
    assert early.worker.name == "trial-2"
    assert scheduler.baseline(lambda: 60.0).worker.name == "trial-1"


def test_processes_import_a_compiler_if_their_candidate_needs_it():
    stage, launched = Stage(), {}

    def launch(name, imports):
        launched[name] = imports
        return stage(name)

    scheduler = SetupScheduler(launch, "cpu", {}, SearchOptions(), Notes())
    scheduler.baseline(lambda: 60.0)
    scheduler.prepare([(EAGER,), (COMPILED,)], 2, 60.0, 1)
    assert launched == {"reference": (), "trial-1": (), "trial-2": (), "trial-3": COMPILER}


@pytest.mark.parametrize(
    ("device", "spare", "beside"),
    [("cuda:0", True, True), ("cuda:0", False, False), ("cpu", True, False)],
)
def test_the_reference_is_made_beside_the_untouched_workload_where_they_share_no_core(
    device, spare, beside
):
    asked, send = [], ScriptedWorker.send

    def noted(self, method, **arguments):
        asked.append((self.name, method))
        send(self, method, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedWorker, "send", noted)
        scheduler = SetupScheduler(Stage(), device, {}, SearchOptions(), Notes(), spare_cores=spare)
        scheduler.baseline(lambda: 60.0)
    begun = [method for _, method in asked]
    assert (begun.index("reference") < begun.index("set_up")) is beside
    assert asked[-2:] == [("reference", "explained"), ("trial-1", "characterise")]


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
    scheduler = SetupScheduler(stage, "cuda", {}, SearchOptions(), Notes(), spare_cores=True)
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
    scheduler = SetupScheduler(Stage(), device, {}, SearchOptions(), Notes(), spare_cores=True)
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


@pytest.mark.parametrize(("device", "spare"), [("cuda", True), ("cpu", False)])
def test_what_is_asked_for_has_the_time_that_was_left_then(device, spare):
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
        scheduler = SetupScheduler(stage, device, {}, SearchOptions(), Notes(), spare_cores=spare)
        scheduler.baseline(lambda: 60.0 - stage.seconds)
    given = dict(reversed(asked))
    assert given["load"] == 60.0
    assert given["reference"] > 55.0 if spare else given["reference"] < 40.0
