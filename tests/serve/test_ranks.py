"""Plans under torchrun: all ranks serve the same plan or none, and train in step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from steadytorch.plan.fingerprint import trained_fingerprint, workload_fingerprint
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan

from .plans import make_plan
from .ranked import MANY_STEPS, STEPS, make_net, make_workload

SCRIPT = Path(__file__).with_name("ranked.py")


@pytest.fixture
def store(tmp_path):
    """A store with a plan for one thread, the default of torchrun."""
    workload, threads = make_workload(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (x,) = workload.inputs
        plan = make_plan(make_net(), x, (TransformSpec("channels_last"),))
    finally:
        torch.set_num_threads(threads)
    fingerprint = workload_fingerprint(workload)
    key = replace(plan.key, workload=fingerprint, objective="throughput")
    plan = replace(plan, key=key, trains=trained_fingerprint(workload.untouched))
    made = Store(tmp_path / "plans", second="")
    assert made.put(key, plan) is not None
    return made


def put_other(plan, folder):
    """A store with another plan under the same key."""
    other = replace(plan, candidate=())
    assert Store(folder / "other", second="").put(plan.key, other) is not None


def run(store, folder, case):
    """What each of two ranks found."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["STEADYTORCH_RANKS_DEADLINE"] = "30"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    torchrun += ("--max-restarts=1",) if case == "killed" else ()
    done = subprocess.run(
        [sys.executable, *torchrun, SCRIPT, store.root, folder, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.mark.parametrize("case", ["no plan", "another plan", "plan"])
@pytest.mark.sampled(every=3)
def test_ranks_serve_one_plan_and_train_in_step(store, tmp_path, case):
    (stored,) = store.entries(Plan)
    put_other(stored.payload, tmp_path)
    found, _ = run(store, tmp_path, case)
    for each in found:
        assert each["id"] == stored.key.digest[:12]
        assert each["transforms"] == ["channels_last"]
        assert each["calls"] == {"tuned": STEPS}
        assert each["weights"] == found[0]["weights"]
        assert "the model contains DistributedDataParallel" in each["wrapped"]
        assert "all ranks run untouched: no rank has a plan" in each["infer"]["together"]
        assert "all ranks" not in each["infer"]["alone"]
    torch.testing.assert_close(
        torch.tensor(found[0]["weights"]), torch.tensor(found[0]["untouched"])
    )
    if case == "no plan":  # rank 1 keeps the plan, for its next start
        assert Store(tmp_path / "empty", second="").get(stored.key, Plan).payload.candidate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("another model", "rank 1: plan {id} does not fit here"),
        ("is off", "rank 1: STEADYTORCH_MODE is off"),
    ],
)
def test_one_rank_that_cannot_serve_leaves_all_untouched(store, tmp_path, case, reason):
    found, said = run(store, tmp_path, case)
    plan_id = found[0]["id"]
    assert reason.format(id=plan_id) in found[0]["off"]
    for each in found:
        assert each["calls"].get("tuned", 0) == 0
        assert each["weights"] == found[0]["weights"]
    assert said.count(f"all ranks run untouched (plan {plan_id})") == 2  # apply, and apply to DDP


@pytest.mark.slow
def test_one_rank_searches_for_all(tmp_path):
    found, _ = run(SimpleNamespace(root=""), tmp_path, "search")
    assert found[0]["searched"] is True
    assert found[1]["searched"] is False
    assert found[0]["transforms"] == found[1]["transforms"]
    assert found[0]["speedup"] == found[1]["speedup"]
    for rank, each in enumerate(found):  # both keep the plan
        (stored,) = Store(tmp_path / f"plans{rank}", second="").entries(Plan)
        assert stored.payload.id == each["id"]


@pytest.mark.slow
def test_a_job_goes_on_after_torchrun_restarts_a_killed_rank(store, tmp_path):
    found, _ = run(store, tmp_path, "killed")
    for each in found:
        assert each["attempt"] == "1"
        assert each["calls"] == {"tuned": MANY_STEPS}
        assert each["weights"] == found[0]["weights"]
    torch.testing.assert_close(
        torch.tensor(found[0]["weights"]), torch.tensor(found[0]["untouched"])
    )
