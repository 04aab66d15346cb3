"""Options set up in worker processes of their own, ours among them."""

from __future__ import annotations

import os

import psutil
import pytest
import rival_arms
import rival_timing
from rival_results import row_of
from torch import nn

from steadytorch import Workload, transforms
from steadytorch.bench.worker import save_payload
from steadytorch.measure.measurement import summarize
from steadytorch.plan.record import Speedup
from steadytorch.process.worker import WorkerFault
from steadytorch.tune.result import TuneResult
from steadytorch.tune.select import Options
from steadytorch.tune.session import Session

from .rivalry import Nested, inputs


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("no such thing")


def stored_plan(workload, folder):
    """A plan that was not searched for, under the key that this process would look for."""
    session = Session(workload, Options(), "cpu", folder)
    some = summarize([1] * 20, "latency")
    result = TuneResult(
        baseline=some,
        winner=some,
        chosen=transforms.parse("inference_mode", session.facts),
        regime="unclassified",
        candidates=(),
        not_applicable={},
        not_tried={},
        speedup=Speedup(1.0, None, None, "process", "tie", 0),
        break_even_calls=None,
        reference="none",
        seconds=0.0,
    )
    return session.keep(result).path


@pytest.fixture
def folder(tmp_path):
    save_payload(Workload(Nested().eval(), inputs()), tmp_path)
    return tmp_path


def started(folder, plan, options, cap_s=60.0):
    told = []
    arms = rival_arms.start_all(plan, options, "cpu", folder, cap_s, told.append)
    return {arm.option: arm for arm in arms}, told


def test_ours_and_a_rival_are_checked_and_timed(folder):
    plan = stored_plan(Workload(Nested().eval(), inputs()), folder / "store")
    arms, told = started(folder, plan, ["eager"])
    try:
        assert {arm.stage for arm in arms.values()} == {"ready"}
        assert len(told) == 3  # with the reference
        block = arms["steadytorch"].worker.call("block", 60, metric="period", count=3)
        arms["steadytorch"].blocks["period"] = [block]
        found = row_of("nested:2", arms["steadytorch"], arms["steadytorch"])
        assert found["error"] < 1e-6
        assert found["setup_s"] > 0
        assert found["period_ms"] > 0
    finally:
        for arm in arms.values():
            arm.worker.kill()


def test_what_is_not_ready_in_time_is_ended(folder):
    arms, _ = started(folder, None, ["eager"], cap_s=0.0)
    assert arms["eager"].failed == "> 0 s, not ready"
    assert not arms["eager"].worker.alive


def test_an_option_that_fails_says_why_and_a_plan_that_is_gone_too(folder):
    arms, _ = started(folder, str(folder / "gone.json"), ["no such option"])
    assert arms["no such option"].failed == "KeyError: 'no such option'"
    assert arms["steadytorch"].failed.endswith("gone.json does not exist: check the path")


def test_a_workload_that_fails_leaves_no_process(tmp_path):
    save_payload(Workload(Broken(), inputs()[1]), tmp_path)
    before = psutil.Process().children()
    with pytest.raises(WorkerFault, match="no such thing"):
        started(tmp_path, None, ["eager"])
    assert psutil.Process().children() == before


def test_only_what_is_autotuned_has_the_shorter_time():
    autotuned = rival_arms.Arm("fp16 compile max-autotune", None, stage="prepare")
    plain = rival_arms.Arm("fp16 compile", None, stage="prepare")
    assert rival_arms.deadline(autotuned, 90.0) == 90.0
    assert rival_arms.deadline(plain, 90.0) == 180.0


def test_compilers_have_caches_of_their_own_and_share_the_cores(tmp_path):
    names = ["eager TF32", "fp16 compile", "fp16 compile max-autotune"]
    found = [rival_arms._environment(name, names, tmp_path) for name in names]
    assert len({each["TORCHINDUCTOR_CACHE_DIR"] for each in found}) == 3
    threads = [int(each["TORCHINDUCTOR_COMPILE_THREADS"]) for each in found]
    assert min(threads) >= 1
    assert max(threads) <= max(1, len(os.sched_getaffinity(0)))


def test_timing_knows_ours_by_its_name():
    assert rival_timing.OURS == rival_arms.OURS == "steadytorch"
