"""Checking a stored plan by the rules of a search, in fresh processes."""

from __future__ import annotations

import tempfile

import pytest
import torch
from faulty import Slow, spec
from msgspec.structs import replace
from scripted import EAGER, MS, Act, Stage, died

from steadytorch import transforms
from steadytorch.device.facts import load_facts
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.measure.race import LOOKS
from steadytorch.plan.fingerprint import make_key
from steadytorch.plan.record import Evidence, Speedup, Timing
from steadytorch.process import worker as processes
from steadytorch.process.worker import Fault
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.tune import reverify as module_under_test
from steadytorch.tune import trial
from steadytorch.tune.reverify import in_rounds, rebuilt, reverify
from steadytorch.tune.select import P99_BLOCK, SearchOptions
from steadytorch.tune.setup_scheduler import NullListener, SetupScheduler
from steadytorch.verification.verdict import OutputError
from steadytorch.verification.verify import INPUT_SETS
from steadytorch.workload.loading import load_workload
from steadytorch.workload.workload import Workload

QUICK = TransformSpec("quick")
ASKED = {"objective": "latency", "precision": "same", "tolerance": None, "max_memory_bytes": None}
TIMING = Timing("latency", 1e6, None, 1.2e6, None, 150)
EVIDENCE = Evidence(
    baseline=TIMING,
    winner=TIMING,
    speedup=Speedup(2.0, 1.9, 2.1, "process", "faster", 20),
    break_even_calls=10,
    regime="memory-bound",
    reference="float64",
    trials=(),
    not_applicable={},
    not_tried={},
    search_s=1.0,
)


def _workload():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Workload(Slow().eval(), torch.randn(2, 8), name="slow")


def _plan(workload=None, candidate=(EAGER,), **asked):
    workload = workload or _workload()
    key = make_key(
        workload,
        workload.signature(),
        load_facts("cpu"),
        **{**ASKED, "ambient": transforms.ambient(), **asked},
    )
    return Plan(
        name=workload.name,
        signature=workload.signature(),
        candidate=candidate,
        evidence=EVIDENCE,
        key=key,
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
    )


# -- rounds, from a script ----------------------------------------------------------------------


def _rounds(act, processes=3, base=None, options=None):
    """Results of rounds with scripted workers, and the stage of each."""
    stages = []

    def prepared(number):
        stages.append(Stage({(): base or Act(), (EAGER,): act}))
        return SetupScheduler(stages[-1], "cpu", {}, options or SearchOptions(), NullListener())

    return in_rounds(_plan(), prepared, processes, options or SearchOptions()), stages


def test_a_plan_that_is_right_and_faster_holds():
    result, stages = _rounds(Act(5 * MS, OutputError(1.5e-7, 1e-7)))
    assert result.failed is None
    assert result.error == 1.5e-7
    assert (result.claim.claim, result.claim.verdict) == ("machine", "faster")
    assert result.claim.estimate == pytest.approx(-0.5, abs=0.01)
    assert result.baseline_ns == pytest.approx(10 * MS, rel=0.01)
    assert result.plan_ns == pytest.approx(5 * MS, rel=0.01)
    assert len(stages) == result.claim.processes == 3


def test_every_round_has_fresh_processes_and_leaves_none():
    _, stages = _rounds(Act(5 * MS))
    for stage in stages:
        assert len(stage.workers) == 3  # the reference, the untouched workload, the plan
        assert not any(worker.alive for worker in stage.workers)


def test_a_plan_gone_slow_fails():
    result, _ = _rounds(Act(11 * MS))
    assert "slower than the untouched workload" in result.failed
    assert result.claim.verdict == "slower"


def test_a_plan_as_fast_as_the_untouched_workload_holds():
    result, _ = _rounds(Act(10 * MS))
    assert result.failed is None


def test_slower_within_the_tie_band_holds():
    result, _ = _rounds(Act(10.03 * MS), processes=5)
    assert result.failed is None


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (Act(error=OutputError(1e-3, 1e-3)), "relative error 1.0e-03 exceeds"),
        (Act(wrong="output 0 holds NaN"), "output 0 holds NaN"),
        (Act(faults={"set_up": [died()]}), "set-up: segmentation fault"),
        (Act(faults={"verify": [died(Fault.DEADLINE, "no answer")]}), "verification: no answer"),
        (Act(blocks_until_death=3), "segmentation fault"),
    ],
)
def test_a_plan_that_is_wrong_or_dies_fails_at_once(act, said):
    result, stages = _rounds(act)
    assert said in result.failed
    assert len(stages) == 1
    assert not any(worker.alive for worker in stages[0].workers)


def test_a_plan_that_fails_late_fails():
    good, bad = Act(5 * MS), Act(5 * MS, wrong="writes to its inputs")
    acts = iter([good, good, bad])
    made = []

    def prepared(number):
        made.append(Stage({(): Act(), (EAGER,): next(acts)}))
        return SetupScheduler(made[-1], "cpu", {}, SearchOptions(), NullListener())

    result = in_rounds(_plan(), prepared, 5, SearchOptions())
    assert (len(made), result.failed) == (3, "writes to its inputs")
    assert result.claim.processes == 2


def test_a_cap_on_memory_still_counts():
    result, _ = _rounds(
        Act(5 * MS, peak_bytes=3 << 30), options=SearchOptions(max_memory_bytes=1 << 30)
    )
    assert "over the cap" in result.failed


@pytest.mark.parametrize("method", ["set_up", "characterise", "block"])
def test_a_workload_that_fails_itself_is_not_the_plans_fault(method):
    base = Act(faults={method: [died()]})
    with pytest.raises(UsageError, match="the untouched workload fails: segm"):
        _rounds(Act(), base=base)


def test_a_workload_that_dies_while_it_is_timed_is_not_the_plans_fault():
    with pytest.raises(UsageError, match="the untouched workload fails"):
        _rounds(Act(), base=Act(blocks_until_death=4))


def test_two_rounds_claim_nothing():
    result, _ = _rounds(Act(20 * MS), processes=2)
    assert result.claim.low is None
    assert result.failed is None


def test_for_p99_the_largest_of_a_block_counts():
    _, (first, *_) = _rounds(Act(5 * MS), options=SearchOptions(objective="p99"))
    blocks = [event for event in first.events if event[0] == "block"]
    assert len(blocks) >= 2 * LOOKS[0]
    assert first.seconds > 2 * LOOKS[0] * P99_BLOCK * 5e-3


# -- what is refused before anything is started -------------------------------------------------


@pytest.fixture
def no_process(monkeypatch):
    def popen(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes.subprocess, "Popen", popen)


def test_a_plan_of_another_machine_is_unsupported_and_the_field_named(no_process):
    plan = _plan()
    other = replace(plan, key=replace(plan.key, driver="570.1"))
    with pytest.raises(UnsupportedError, match=r"does not fit here: driver was 570\.1, is"):
        reverify(other, _workload())


def test_a_plan_of_another_workload_is_misuse(no_process):
    other = Workload(torch.nn.Linear(8, 8).eval(), torch.randn(2, 8))
    with pytest.raises(UsageError, match="does not fit here: workload was"):
        reverify(_plan(), other)
    shaped = Workload(_workload().model, torch.randn(3, 8))
    with pytest.raises(UsageError, match="signature was 2x8:float32, is 3x8:float32"):
        reverify(_plan(), shaped)


def test_the_empty_plan_holds_without_a_process(no_process):
    result = reverify(_plan(candidate=()), _workload())
    assert (result.failed, result.claim, result.error) == (None, None, None)


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ([TransformSpec("os.system")], "unknown transform"),
        ([TransformSpec("threads", (("count", -1),))], "does not support"),
        ([TransformSpec("cast_weights", (("dtype", "bf16"),))], "it computes in bf16"),
        ([EAGER, EAGER], "is listed twice"),
    ],
)
def test_a_candidate_that_no_search_could_choose_fails(no_process, candidate, said):
    assert said in reverify(_plan(candidate=tuple(candidate)), _workload()).failed


@pytest.mark.parametrize(
    "asked", [{"precision": "int4"}, {"objective": "luck"}, {"tolerance": 0.5}]
)
def test_a_plan_that_nobody_could_have_asked_for_is_misuse(no_process, asked):
    with pytest.raises(UsageError):
        reverify(_plan(**asked), _workload())


@pytest.mark.parametrize("count", [0, -1])
def test_no_round_is_refused(no_process, count):
    with pytest.raises(UsageError, match="give 1 or more"):
        reverify(_plan(), _workload(), processes=count)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_plan_for_a_gpu_that_is_not_there_is_unsupported(no_process):
    plan = _plan()
    with pytest.raises(UnsupportedError, match="cuda"):
        reverify(replace(plan, key=replace(plan.key, device="cuda")), _workload())


# -- the workload of a plan ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{"batch": 3}, {"inputs": ["2x3x64x64"]}])
def test_the_workload_of_a_bundled_plan_is_rebuilt_as_it_was(shape):
    workload = load_workload("resnet18", **shape)
    plan = _plan(workload)
    again = rebuilt(plan)
    assert again.signature() == workload.signature()
    assert _plan(again).key == plan.key


def test_a_name_in_a_plan_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\ndef make(): pass\n")
    for name in ("evil.py:make", "evil:make", f"{tmp_path}/evil.py:make", "torchvision:resnet18"):
        with pytest.raises(UsageError, match="pass it with --workload"):
            rebuilt(replace(_plan(), name=name))
    assert not (tmp_path / "ran").exists()


# -- real processes -----------------------------------------------------------------------------


@pytest.fixture
def faulty_workers(faulty_transforms, monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "HANDLER", "faulty:FaultyHandler")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
def test_a_good_plan_holds_in_real_processes(faulty_workers, no_process_left, tmp_path):
    told = []
    result = reverify(
        _plan(candidate=(QUICK,)), _workload(), processes=1, seed=3, progress=told.append
    )
    assert result.failed is None
    assert result.error < 1e-5
    assert result.claim.estimate < -0.5
    assert told == ["round 1 of 1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_plan_gone_wrong_is_found_in_real_processes(faulty_workers, no_process_left):
    result = reverify(_plan(candidate=(spec("wrong"),)), _workload())
    assert "relative error 1.0e-03 exceeds" in result.failed
    assert result.claim is None


def test_rounds_verify_on_other_inputs(faulty_workers, monkeypatch):
    seeds = []

    class Noted(SetupScheduler):
        def __init__(self, launch, device, ambient, options, watcher):
            super().__init__(Stage({(QUICK,): Act(5 * MS)}), device, ambient, options, watcher)
            seeds.append(options.seed)

    monkeypatch.setattr(module_under_test, "SetupScheduler", Noted)
    assert reverify(_plan(candidate=(QUICK,)), _workload(), processes=3, seed=7).failed is None
    assert seeds == [7, 7 + INPUT_SETS, 7 + 2 * INPUT_SETS]
