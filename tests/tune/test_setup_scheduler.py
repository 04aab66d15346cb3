import pytest
from scripted import (
    DETERMINISTIC,
    EAGER,
    FLOPS,
    FOLD,
    LAYOUT,
    TF32,
    Act,
    Elsewhere,
    Notes,
    ScriptedWorker,
    Stage,
    died,
)

from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.tune import setup_scheduler
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.setup_scheduler import SetupScheduler
from steadytorch.verification.verdict import OutputError

SINGLES = [(EAGER,), (FOLD,), (DETERMINISTIC,), (LAYOUT,)]


class Diary(Notes):
    def __init__(self):
        super().__init__()
        self.states = []

    def trial(self, label, state, detail=""):
        self.states.append((label, state, detail))


def prepared(stage, options=None, watcher=None):
    """A scheduler with its baseline set up."""
    scheduler = SetupScheduler(stage, "cpu", {}, options or SearchOptions(), watcher or Notes())
    scheduler.baseline(lambda: 60.0)
    return scheduler


def _prepare(stage, candidates, slots=2, others=1, **arguments):
    scheduler = prepared(stage, **arguments)
    return scheduler, scheduler.prepare(candidates, slots, 60.0, others)


def test_the_baseline_is_set_up_untouched_and_characterised():
    stage = Stage(regime="launch-bound")
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), Notes())
    baseline = scheduler.baseline(lambda: 60.0)
    assert (baseline.candidate, baseline.stage, baseline.ok) == ((), "timing", True)
    assert (scheduler.character.regime, stage.told_flops) == ("launch-bound", FLOPS)
    assert scheduler.reference.precision == "float64"


def test_the_process_of_the_reference_does_not_stay():
    stage = Stage()
    scheduler = prepared(stage)
    assert [worker.name for worker in stage.workers if worker.alive] == ["trial-1"]
    assert scheduler.reference.repeatable


def test_a_workload_that_cannot_be_profiled_is_tuned_without_findings():
    stage = Stage({(): Act(faults={"explained": [died()]})})
    notes = Notes()
    scheduler = SetupScheduler(stage, "cpu", {}, SearchOptions(), notes)
    assert scheduler.baseline(lambda: 60.0).ok
    assert scheduler.findings == ()
    assert stage.told_flops is None
    assert any("profiling failed (segmentation fault" in phase for phase in notes.phases)


@pytest.mark.parametrize("method", ["load", "set_up", "reference", "characterise"])
def test_a_fault_of_the_baseline_is_passed_on(method):
    stage = Stage({(): Act(faults={method: [died()]})})
    with pytest.raises(WorkerFault):
        prepared(stage)


def test_the_callers_settings_and_device_reach_every_worker(monkeypatch):
    loads = []
    stage = Stage()
    scheduler = SetupScheduler(stage, "cpu", {"num_threads": "1"}, SearchOptions(), Notes())
    original = ScriptedWorker.send

    def send(self, method, **arguments):
        if method == "load":
            loads.append((arguments["device"], arguments["ambient"]))
        original(self, method, **arguments)

    monkeypatch.setattr(ScriptedWorker, "send", send)
    scheduler.baseline(lambda: 60.0)
    scheduler.prepare([(EAGER,)], 1, 60.0, 1)
    assert loads == [("cpu", {"num_threads": "1"})] * 3


def test_every_candidate_comes_back_ready_to_be_timed():
    _, trials = _prepare(Stage(), SINGLES)
    assert {trial.candidate for trial in trials} == set(SINGLES)
    assert all(trial.ok and trial.stage == "timing" for trial in trials)
    assert all(trial.verification.error.relative_l2 == 1e-7 for trial in trials)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_than_the_slots_are_under_way_at_once(slots):
    stage = Stage()
    scheduler = prepared(stage)
    most = 0
    original = stage.exchange

    def watch():
        nonlocal most
        most = max(most, sum(worker.ready() for worker in stage.workers))
        original()

    stage.exchange = watch
    scheduler.prepare(SINGLES, slots, 60.0, 1)
    assert most <= slots
    assert len(stage.tried()) == 1 + len(SINGLES)


def test_one_that_dies_takes_no_other_with_it():
    stage = Stage({(FOLD,): Act(faults={"set_up": [died()]})})
    _, trials = _prepare(stage, SINGLES)
    ended = {trial.candidate: trial.status for trial in trials}
    assert ended.pop((FOLD,)) == "rejected"
    assert set(ended.values()) == {"ok"}


def test_the_watcher_hears_of_every_change_of_state():
    diary = Diary()
    stage = Stage({(DETERMINISTIC,): Act(faults={"verify": [died()]})})
    _prepare(stage, [(EAGER,), (DETERMINISTIC,)], slots=1, watcher=diary)
    assert diary.states == [
        ("untouched", "set-up", ""),
        ("untouched", "verified", ""),
        ("inference_mode", "set-up", ""),
        ("inference_mode", "verified", ""),
        ("cudnn_deterministic", "set-up", ""),
        ("cudnn_deterministic", "rejected", "verification: segmentation fault (SIGSEGV)"),
    ]


def test_a_tolerance_of_the_user_holds_for_allowed_precisions_only():
    act = Act(error=OutputError(2e-2, 2e-2))
    options = SearchOptions(precision="tf32", tolerance=0.05)
    _, (allowed,) = _prepare(Stage({(TF32,): act}), [(TF32,)], options=options)
    _, (shown,) = _prepare(Stage({(TF32,): act}), [(TF32,)], options=SearchOptions(tolerance=0.05))
    assert allowed.ok
    assert shown.reason == "relative error 2.0e-02 exceeds 5.0e-03"


def test_memory_is_looked_at_once_the_outputs_are_right():
    act = Act(peak_bytes=2 << 30, wrong="output 0 holds NaN")
    options = SearchOptions(max_memory_bytes=1 << 30)
    _, (wrong,) = _prepare(Stage({(EAGER,): act}), [(EAGER,)], options=options)
    _, (large,) = _prepare(Stage({(EAGER,): Act(peak_bytes=2 << 30)}), [(EAGER,)], options=options)
    assert wrong.reason == "output 0 holds NaN"
    assert "over the cap" in large.reason


def _out_of_memory(times=1):
    return Act(faults={"set_up": [died(Fault.OUT_OF_MEMORY, "out of memory")] * times})


def test_one_out_of_memory_beside_others_is_owed_a_second_try():
    scheduler, (trial,) = _prepare(Stage({(EAGER,): _out_of_memory()}), [(EAGER,)])
    assert trial.reason == "set-up: out of memory"
    assert scheduler.retry == [(EAGER,)]


def test_one_out_of_memory_on_its_own_is_not():
    scheduler, _ = _prepare(Stage({(EAGER,): _out_of_memory()}), [(EAGER,)], others=0)
    assert scheduler.retry == []


def test_the_second_try_is_alone_and_the_last():
    stage = Stage({(EAGER,): _out_of_memory(times=2)})
    scheduler, _ = _prepare(stage, [(EAGER,)])
    under_way = []
    original = stage.exchange

    def watch():
        under_way.append(sum(worker.ready() for worker in stage.workers))
        original()

    stage.exchange = watch
    trials = scheduler.prepare([(EAGER,), (FOLD,), (DETERMINISTIC,)], 3, 60.0, 1)
    assert max(under_way) == 1
    assert [trial.status for trial in trials] == ["rejected", "ok", "ok"]
    assert scheduler.retry == []


def test_other_faults_are_not_tried_again():
    scheduler, _ = _prepare(Stage({(EAGER,): Act(faults={"set_up": [died()]})}), [(EAGER,)])
    assert scheduler.retry == []


def test_all_workers_can_be_ended_at_any_time():
    stage = Stage()
    scheduler, _ = _prepare(stage, SINGLES)
    assert any(worker.alive for worker in stage.workers)
    scheduler.kill_all()
    assert not any(worker.alive for worker in stage.workers)


@pytest.fixture
def no_waiting(monkeypatch):
    """Does not wait for workers without an answer."""
    monkeypatch.setattr(setup_scheduler, "wait_any", lambda workers, seconds: None)


def test_what_is_begun_is_taken_further_while_another_worker_is_waited_for(no_waiting):
    stage = Stage()
    scheduler = prepared(stage)
    scheduler.begin([(EAGER,), (DETERMINISTIC,)], 2, 60.0)
    assert scheduler.begun == ((EAGER,), (DETERMINISTIC,))
    assert scheduler.pump_until(Elsewhere(50, "an answer"), 60.0) == "an answer"
    # On a CPU, none is verified while the other worker runs a model.
    assert {trial.stage for trial in scheduler.under_way} == {"waiting"}
    scheduler.pump_until(Elsewhere(50, None), 60.0, loads=True)
    assert {trial.stage for trial in scheduler.under_way} == {"timing"}
    before = len(stage.events)
    trials = scheduler.prepare([], 2, 60.0, 1)
    assert [trial.candidate for trial in trials] == [(EAGER,), (DETERMINISTIC,)]
    assert all(trial.ok for trial in trials)
    assert (len(stage.events), scheduler.begun) == (before, ())


def test_what_waits_for_a_slot_is_begun_too(no_waiting):
    scheduler = prepared(Stage())
    scheduler.begin(SINGLES, 1, 60.0)
    scheduler.pump_until(Elsewhere(1, None), 60.0)
    assert set(scheduler.begun) == set(SINGLES)
    trials = scheduler.prepare([(TF32,)], 3, 60.0, 1)
    assert [trial.candidate for trial in trials] == [*SINGLES, (TF32,)]


def test_what_became_of_that_worker_is_said():
    with pytest.raises(WorkerFault, match="segmentation"):
        prepared(Stage()).pump_until(Elsewhere(0, died()), 60.0)


def test_each_has_the_time_that_it_was_begun_with():
    stage, asked = Stage(), {}
    scheduler = prepared(stage)
    scheduler.begin([(EAGER,)], 2, 90.0)
    receive = ScriptedWorker.receive

    def watch(self, deadline_s):
        asked[self.name] = deadline_s
        return receive(self, deadline_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedWorker, "receive", watch)
        trials = scheduler.prepare([(DETERMINISTIC,)], 2, 30.0, 1)
    assert [asked[trial.worker.name] for trial in trials] == [90.0, 30.0]


def test_what_is_not_ready_in_time_is_given_up_with_the_reason():
    stage = Stage()
    scheduler = prepared(stage)
    looks = iter([False, False, True])
    assert scheduler.prepare(SINGLES, 2, 60.0, 1, lambda: next(looks)) == []
    scheduler.give_up("budget exhausted")
    trials = scheduler.prepare([], 2, 60.0, 1)
    assert [trial.status for trial in trials] == ["skipped", "skipped"]
    assert {trial.reason for trial in trials} == {"waiting: budget exhausted"}
    assert not any(trial.worker.alive for trial in trials)
    assert scheduler.begun == ()
