"""`plan.step` around DDP under torchrun: ranks train in step, and end a plan together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.nn.parallel import DistributedDataParallel

import steadytorch as steady
from steadytorch.errors import UsageError
from steadytorch.plan.fingerprint import trained_fingerprint, workload_fingerprint
from steadytorch.ranks.checkpoints import AHEAD, EVERY
from steadytorch.results.candidate import TransformSpec

from .ddp_ranked import FAULT_AT, STEPS, batch, loss_of, make_net, make_optimizer
from .plans import make_plan, write

SCRIPT = Path(__file__).with_name("ddp_ranked.py")
FUSED = TransformSpec("optimizer", (("implementation", "fused"), ("merge", False)))
LAYOUT = TransformSpec("channels_last")
COMPILE = TransformSpec("compile")


def run(folder, case, candidate=(LAYOUT, FUSED)):
    """What each of two ranks found, and what they said."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the default of torchrun
    try:
        net, (x, y) = make_net(), batch(0, 0)
        workload = steady.Workload.training(net, x, loss_of, make_optimizer(net), targets=y)
        plan = make_plan(net, x, candidate)
    finally:
        torch.set_num_threads(threads)
    key = replace(plan.key, workload=workload_fingerprint(workload), objective="throughput")
    plan = replace(plan, key=key, trains=trained_fingerprint(net))
    path = write(folder, plan)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"STEADYTORCH_RANKS_DEADLINE": "60", "OMP_NUM_THREADS": "1"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *torchrun, SCRIPT, path, folder, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], done.stderr


def assert_trained_as_plain_ddp(found):
    for each in found:
        assert each["weights"] == found[0]["weights"]
        assert each["kept"]
        torch.testing.assert_close(
            torch.tensor(each["weights"]), torch.tensor(each["plain"]), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("case", ["served", "accumulated", "made anew"])
@pytest.mark.sampled(every=3)
def test_ranks_train_in_step_as_plain_ddp_does(tmp_path, case):
    found, _ = run(tmp_path, case)
    assert_trained_as_plain_ddp(found)
    for each in found:
        assert each["off"] is None
        assert each["optimizer"] == "fused"
        assert "tuned" in each["report"] or "eager" in each["report"]


@pytest.mark.slow
def test_compiled_code_inside_ddp_trains_as_plain_ddp_does(tmp_path):
    found, _ = run(tmp_path, "served", (COMPILE, FUSED))
    assert_trained_as_plain_ddp(found)
    assert all(each["off"] is None for each in found)


def test_a_fault_on_one_rank_ends_the_plan_on_all_at_one_step(tmp_path):
    found, _ = run(tmp_path, "fault")
    assert_trained_as_plain_ddp(found)
    agreed = (FAULT_AT // EVERY + AHEAD) * EVERY
    assert agreed < STEPS
    assert found[1]["off_since"] == FAULT_AT  # the rank itself runs untouched at once
    assert agreed <= found[0]["off_since"] + 1 <= agreed + EVERY
    assert "ended on all ranks (rank 1: modules, hooks, modes" in found[0]["off"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("static graph", "ranks 0, 1: DDP uses static_graph=True"),
        ("fsdp", "the model contains FSDPModule"),
    ],
)
def test_what_cannot_be_served_runs_untouched_with_one_reason(tmp_path, case, reason):
    found, said = run(tmp_path, case)
    for each in found:
        assert reason in each["off"]
        assert each["off_since"] == 0
    assert said.count("all ranks run untouched (plan") == 1


def test_ddp_around_a_tuned_model_is_refused(tmp_path):
    net, (x, y) = make_net(), batch(0, 0)
    plan = replace(make_plan(net, x, (LAYOUT,)), trains=trained_fingerprint(net))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tuned = DistributedDataParallel(plan.apply(net))
        with pytest.raises(UsageError, match="DDP around the untouched model"):
            plan.step(tuned, make_optimizer(net), loss_of)
        step = plan.step(DistributedDataParallel(net), make_optimizer(net), loss_of)
        assert torch.isfinite(step(x, y))
    finally:
        dist.destroy_process_group()
