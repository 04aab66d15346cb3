import logging
import sys
import tempfile
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from faulty import Slow
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from steadytorch import Workload, load_plan, transforms, tune
from steadytorch.errors import PlanError, UnsupportedError, UsageError
from steadytorch.plan.store import Store
from steadytorch.process import worker as processes
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import trial
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session, objection
from steadytorch.tune.setup_scheduler import NullListener, SetupScheduler

QUICK = TransformSpec("quick")


def _workload():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Workload(Slow().eval(), torch.randn(2, 8))


def _not_here(*arguments, **options):
    raise AssertionError("this must not happen in this process")


@pytest.fixture(scope="module")
def tuned(faulty_transforms, tmp_path_factory):
    """One real tuning with one option, with this process's state before and after."""
    store, scratch = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("scratch")
    workload, results = _workload(), []
    weights = {name: value.clone() for name, value in workload.model.state_dict().items()}
    settings, random = transforms.ambient(), torch.get_rng_state()
    children = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "HANDLER", "faulty:FaultyHandler")
        patch.setattr(Session, "options_that_apply", lambda self: ([QUICK], {"tf32": "no GPU"}))
        patch.setattr(tempfile, "tempdir", str(scratch))
        search = Session.search

        def remembered(self, watcher=None):
            results.append(search(self, watcher))
            return results[-1]

        patch.setattr(Session, "search", remembered)
        # Unlike a change of the class, a global module hook is not part of the workload.
        guard = register_module_forward_pre_hook(_not_here)
        try:
            plan = tune(workload, budget="10m", store=store, seed=3)
        finally:
            guard.remove()
    return SimpleNamespace(
        plan=plan,
        result=results[0],
        store=store,
        workload=workload,
        left_behind=list(scratch.iterdir()),
        children=set(psutil.Process().children(recursive=True)) - children,
        settings=(settings, transforms.ambient()),
        random=(random, torch.get_rng_state()),
        weights=(weights, workload.model.state_dict()),
    )


@pytest.fixture
def searches(tuned, monkeypatch):
    """Counted searches that return the real one's result at once."""
    made = []

    def search(self, watcher=None):
        made.append(self)
        return tuned.result

    monkeypatch.setattr(Session, "search", search)
    return made


# -- one tuning -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_holds_the_winner_and_the_evidence(tuned):
    plan = tuned.plan
    assert (plan.candidate, plan.name) == ((QUICK,), "Slow")
    assert plan.evidence.speedup.verdict == "faster"
    assert plan.evidence.not_applicable == {"tf32": "no GPU"}
    assert plan.signature == tuned.workload.signature()
    (found,) = [t for t in plan.evidence.trials if t.transforms == (QUICK,)]
    assert found.error < 1e-5


def test_the_plan_serves_the_workloads_own_outputs(tuned):
    model, inputs = tuned.workload.model, tuned.workload.inputs
    served = tuned.plan.apply(model)
    with torch.no_grad():
        assert torch.equal(served(*inputs), model(*inputs))
    assert served.report().calls == {"tuned": 1}


def test_the_plan_is_in_the_store_that_was_named(tuned):
    assert tuned.plan.path.startswith(str(tuned.store))
    assert load_plan(tuned.plan.path) == tuned.plan


def test_the_callers_process_is_as_it_was(tuned):
    for before, after in (tuned.settings, map(str, tuned.random)):
        assert before == after
    before, after = tuned.weights
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not tuned.children


def test_no_file_is_left_behind(tuned):
    assert tuned.left_behind == []


# -- replay, tune, strict ---------------------------------------------------------------------


def test_the_second_time_the_plan_is_replayed_without_any_worker(tuned, monkeypatch):
    monkeypatch.setattr(processes.subprocess, "Popen", _not_here)
    assert tune(_workload(), store=tuned.store) == tuned.plan
    assert tune(_workload(), store=tuned.store, mode="strict") == tuned.plan


def test_mode_tune_searches_anew_and_replaces_the_plan(tuned, searches):
    plan = tune(_workload(), store=tuned.store, mode="tune")
    assert len(searches) == 1
    assert (plan.path, plan.candidate) == (tuned.plan.path, tuned.plan.candidate)


def test_cores_are_contended_on_a_cpu_only(tuned, monkeypatch):
    module = sys.modules[Session.__module__]
    monkeypatch.setattr(module, "resolve_device", lambda device: "cuda:0")
    with pytest.raises(
        UsageError, match="is for CPUs, where a neighbour takes cores, not for cuda:0"
    ):
        Session(tuned.workload, SearchOptions(objective="contended"))


@pytest.mark.parametrize(
    ("candidate", "not_tried", "budget_s", "again"),
    [
        ((), {"channels_last": "budget exhausted"}, 90, True),
        ((), {"channels_last": "budget exhausted"}, 80, False),
        ((), {"channels_last": "no gain expected"}, 90, False),
        ((QUICK,), {"channels_last": "budget exhausted"}, 90, False),
    ],
)
def test_an_untouched_plan_of_a_short_search_gives_way_to_a_longer_one(
    tuned, searches, tmp_path, candidate, not_tried, budget_s, again
):
    replace = msgspec.structs.replace
    evidence = replace(tuned.plan.evidence, not_tried=not_tried, search_s=60.0, trials=())
    plan = replace(tuned.plan, candidate=candidate, evidence=evidence, path=None)
    store = Store(tmp_path)
    assert store.put(plan.key, plan)
    session = Session(tuned.workload, SearchOptions(budget_s=budget_s), store=store)
    found, reason = session.find("replay")
    assert (found is None) == again
    assert ("looking again" in reason) == again
    assert session.find("strict")[0] is not None
    # The longer search's plan takes the place of the untouched one, and stays.
    kept = session.find_or_search("replay")
    assert kept.candidate == ((QUICK,) if again else candidate)
    assert session.find_or_search("replay") == kept
    assert len(searches) == again


def test_mode_strict_searches_nothing_and_names_the_field_that_differs(tuned, searches):
    with pytest.raises(PlanError) as caught:
        tune(_workload(), store=tuned.store, mode="strict", precision="bf16")
    assert "no stored plan for Slow" in str(caught.value)
    assert "precision was same, is bf16" in str(caught.value)
    assert searches == []


@pytest.mark.parametrize(
    "request_", [{"precision": "tf32"}, {"objective": "p99"}, {"max_memory": "8GiB"}]
)
def test_another_request_is_another_plan(tuned, searches, request_, tmp_path):
    session = Session(_workload(), SearchOptions(), store=tmp_path)
    session.keep(tuned.result)
    tune(_workload(), store=tmp_path, **request_)
    assert len(searches) == 1


def test_other_inputs_are_a_miss(tuned, searches):
    workload = _workload()
    other = Workload(workload.model, torch.randn(5, 8))
    plan, reason = Session(other, SearchOptions(), store=tuned.store).look_up()
    assert plan is None
    assert "nearest plan: 2x8:float32 (inputs[0] differs in shape)" in reason


def test_a_store_that_cannot_be_written_leaves_the_plan_in_memory(searches, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        plan = tune(_workload(), store=tmp_path / "file" / "plans")
    assert plan.path is None
    assert plan.candidate == (QUICK,)
    assert len(caplog.records) == 1
    assert "in memory only" in caplog.text


def test_a_store_that_cannot_be_written_is_told_before_the_search(tmp_path, caplog, monkeypatch):
    said = []

    def start(self):
        said.extend(caplog.messages)
        raise KeyboardInterrupt

    monkeypatch.setattr(SetupScheduler, "start", start)
    (tmp_path / "file").write_text("in the way")
    session = Session(_workload(), SearchOptions(), store=tmp_path / "file" / "plans")
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        session.search()
    assert len(said) == 1
    assert said[0].startswith("plans are kept in memory only: ")


def test_an_interrupted_search_is_an_interruption_and_stores_nothing(tuned, monkeypatch, tmp_path):
    partial = msgspec.structs.replace(
        tuned.result, winner=None, speedup=None, chosen=(), interrupted=True
    )
    monkeypatch.setattr(Session, "search", lambda self, watcher=None: partial)
    with pytest.raises(KeyboardInterrupt):
        tune(_workload(), store=tmp_path / "plans")
    assert not (tmp_path / "plans").exists()


def test_a_broken_search_leaves_no_file_and_no_process(
    monkeypatch, tmp_path, no_process_left, faulty_transforms
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broken = Workload(Slow().eval(), torch.randn(2, 9))
    with pytest.raises(UsageError, match="the untouched workload fails"):
        Session(broken, SearchOptions(), store=tmp_path / "plans").search(NullListener())
    assert list(tmp_path.iterdir()) == []


# -- misuse -----------------------------------------------------------------------------------


def test_inference_that_updates_statistics_is_refused_with_what_to_do(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    workload = Workload(model, torch.zeros(4, 2))
    with pytest.raises(UsageError, match=r"statistics of 1: call model.eval\(\) first, or pass"):
        tune(workload, store=tmp_path)
    step = Workload.training(model, torch.zeros(4, 2), torch.sum, torch.optim.SGD)
    assert (
        Session(step, SearchOptions(), store=tmp_path).key
        != Session(Workload(model.eval(), torch.zeros(4, 2)), SearchOptions(), store=tmp_path).key
    )


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_inference_that_drops_at_random_is_refused_with_what_to_do(share):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(share)).train()
    found = objection(Workload(model, torch.zeros(4, 2)))
    assert (found is not None) == (share > 0)
    if found is not None:
        assert "because of the random numbers of 1: call model.eval() first, or pass" in found
    assert objection(Workload(model.eval(), torch.zeros(4, 2))) is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast': choose one of replay, tune, strict"),
        ({"budget": "soon"}, "'soon' is not a time"),
        ({"max_memory": "much"}, "'much' is not a size"),
        ({"precision": "int4"}, "unknown precision 'int4'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"tolerance": 2.0}, "tolerance 2.0"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_started(
    request_, message, monkeypatch, tmp_path
):
    monkeypatch.setattr(processes.subprocess, "Popen", _not_here)
    with pytest.raises(UsageError, match=message):
        tune(_workload(), store=tmp_path, **request_)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that is asked for")
def test_a_device_that_is_not_there_is_unsupported(tmp_path):
    with pytest.raises(UnsupportedError, match="cuda"):
        tune(_workload(), device="cuda", store=tmp_path)


def test_processes_that_were_started_for_what_cannot_be_sent_to_them_are_gone(tmp_path):
    workload = _workload()
    workload.model.held = (line for line in ())
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UsageError, match="cannot be sent to a worker process"):
        Session(workload, SearchOptions(), store=tmp_path).search(NullListener())
    assert set(psutil.Process().children(recursive=True)) <= before


def test_every_option_is_offered_or_refused_with_a_reason(tmp_path):
    session = Session(_workload(), SearchOptions(), store=tmp_path)
    available, refused = session.options_that_apply()
    every = [str(t.spec) for t in transforms.all_variants(session.facts)]
    assert sorted([*map(str, available), *refused]) == sorted(every)
    assert "inference_mode" in map(str, available)
    assert all(refused.values())


def test_every_process_of_a_search_imports_what_defines_the_model(tmp_path, monkeypatch):
    class Asked(Exception):  # noqa: N818 - ends the search where the first process is started
        pass

    def started(*arguments, server):
        *_, imports = arguments
        assert Slow.__module__ in imports
        raise Asked

    monkeypatch.setattr(trial, "Worker", started)
    with pytest.raises(Asked):
        Session(_workload(), SearchOptions(), store=tmp_path).search(NullListener())


@pytest.mark.parametrize(("cores", "spare"), [(None, False), (3, False), (4, True), (64, True)])
def test_the_reference_is_made_beside_the_workload_where_cores_are_spare(
    tmp_path, monkeypatch, cores, spare
):
    class Asked(Exception):  # noqa: N818 - ends the search where it has said what it wants
        pass

    asked = []

    def scheduler(*arguments, **further):
        asked.append(arguments[-1])
        raise Asked

    monkeypatch.setattr(sys.modules[Session.__module__], "SetupScheduler", scheduler)
    session = Session(_workload(), SearchOptions(), store=tmp_path)
    session.facts = msgspec.structs.replace(session.facts, cores_logical=cores)
    with pytest.raises(Asked):
        session.search(NullListener())
    assert asked == [spare]
