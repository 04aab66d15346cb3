import numpy as np
import pytest
from scripted import EAGER, MS, TF32, Act, Stage, died

from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.tune import trial as module
from steadytorch.tune.trial import HANDLER, LiveTrial, WorkerLauncher


def _live(candidate=(EAGER,), act=None):
    """A trial whose worker is set up and can be timed."""
    stage = Stage({candidate: act or Act(8 * MS)})
    live = LiveTrial(candidate, stage("t"))
    specs = [{"name": s.name, "parameters": s.parameters} for s in candidate]
    live.accept_set_up(live.worker.call("set_up", 1.0, candidate=specs))
    live.accept_verification(live.worker.call("verify", 1.0))
    live.stage = "timing"
    return live


def test_a_trial_that_was_not_timed_is_slower_than_any_other():
    assert _live().screened_ns == float("inf")


def test_blocks_are_kept_in_order_and_screened_by_the_median_of_their_medians():
    live = _live()
    live.blocks = [[1, 2, 9], [4, 4, 4], [5, 90, 5]]
    assert live.screened_ns == 4.0
    taken = live.block("latency", 7, 1.0)
    assert live.blocks[-1] is taken
    assert len(taken) == 7


@pytest.mark.parametrize(("took", "count"), [(8 * MS, 5), (800 * MS, 2)])
def test_the_first_block_has_fewer_iterations_where_they_take_long(took, count):
    assert len(_live(act=Act(took)).quiet("latency", 60.0)) == count


def test_a_measurement_may_start_at_a_later_block():
    live = _live()
    live.blocks = [[10, 10, 10], [20, 20, 20], [30, 30, 30]]
    assert live.measured("latency").median_ns == 20
    late = live.measured("latency", since=2)
    assert (late.median_ns, late.samples_ns, late.metric) == (30, (30, 30, 30), "latency")


def test_six_blocks_too_short_for_an_interval_of_their_own_have_one_from_their_medians():
    live = _live()
    live.blocks = [[m - 5, m, m + 5] for m in (100, 101, 102, 103, 104, 105)]
    found = live.measured("latency")
    assert found.median_ci_ns == (100.0, 105.0)
    assert found.why_no_ci is None


def test_an_interval_from_block_medians_holds_the_median_of_all_samples():
    live = _live()
    # Bursts: the median of most blocks is 30, that of all samples 10.
    live.blocks = [[10, 30, 30]] * 12 + [[10] * 30]
    found = live.measured("latency")
    assert (found.median_ns, found.median_ci_ns) == (10, (10, 30))


def test_five_blocks_have_no_interval_and_say_why():
    live = _live()
    live.blocks = [[100 + i] * 3 for i in range(5)]
    found = live.measured("latency")
    assert found.median_ci_ns is None
    assert "of 50 needed" in found.why_no_ci


def test_many_samples_have_their_own_interval():
    live = _live()
    live.blocks = np.random.default_rng(0).integers(900, 1100, (40, 10)).tolist()
    low, high = live.measured("latency").median_ci_ns
    assert 900 < low < high < 1100


@pytest.mark.parametrize("fault", [Fault.SIGNAL, Fault.EXIT, Fault.DEADLINE, Fault.OUT_OF_MEMORY])
def test_a_fault_of_its_process_rejects_it_and_names_the_stage(fault):
    live = _live()
    live.stage = "verification"
    live.reject(died(fault, "how it ended"))
    assert (live.status, live.reason) == ("rejected", "verification: how it ended")
    assert live.fault is fault
    assert not live.ok
    assert not live.worker.alive


def test_an_exception_is_a_failure_and_a_broken_rule_is_not():
    failed, rejected = _live(), _live()
    failed.stage = "set-up"
    failed.reject(died(Fault.RAISED, "ValueError: no"))
    rejected.reject("relative error 1 exceeds 0")
    assert (failed.status, failed.reason) == ("failed", "set-up: ValueError: no")
    assert (rejected.status, rejected.reason) == ("rejected", "relative error 1 exceeds 0")
    assert not rejected.worker.alive


def test_death_during_a_block_rejects_it_keeps_its_samples_and_is_passed_on():
    live = _live(act=Act(blocks_until_death=2))
    live.block("latency", 3, 1.0)
    live.block("latency", 3, 1.0)
    with pytest.raises(WorkerFault):
        live.block("latency", 3, 1.0)
    assert (live.status, live.reason) == ("rejected", "segmentation fault (SIGSEGV)")
    assert len(live.blocks) == 2
    assert live.frozen(allowed=True).samples == 6


def test_a_trial_whose_worker_is_gone_cannot_be_timed():
    live = _live()
    live.worker.kill()
    assert live.status == "ok"
    assert not live.ok


def test_a_frozen_trial_holds_what_was_found():
    live = _live((EAGER, TF32), Act(8 * MS, peak_bytes=123, setup_s=2.5))
    live.blocks = [[100, 102, 104]] * 8
    frozen = live.frozen(allowed=False)
    assert frozen.transforms == (EAGER, TF32)
    assert (frozen.precision, frozen.status, frozen.allowed) == ("tf32", "ok", False)
    assert (frozen.error, frozen.peak_memory_bytes, frozen.setup_s) == (1e-7, 123, 2.5)
    assert (frozen.median_ns, frozen.samples) == (102.0, 24)
    assert frozen.median_ci_ns == (102.0, 102.0)


def test_a_trial_that_never_began_freezes_too():
    frozen = LiveTrial((), Stage()("t")).frozen(allowed=True)
    assert (frozen.error, frozen.peak_memory_bytes, frozen.median_ns) == (None, None, None)
    assert frozen.samples == 0


def test_all_workers_share_one_environment(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(module, "Worker", lambda *arguments, server: started.append(arguments))
    launch = WorkerLauncher(tmp_path, 1 << 30, {"STEADY_TEST": "1"}, ["a.model"])
    launch("a", ["a.compiler"])
    launch("b")
    same = ({"STEADY_TEST": "1"}, 1 << 30)
    assert started == [
        (HANDLER, tmp_path, "a", *same, ("a.model", "a.compiler")),
        (HANDLER, tmp_path, "b", *same, ("a.model",)),
    ]
