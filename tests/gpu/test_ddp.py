"""`plan.step` around DDP over NCCL: equal parameters on all ranks, recorded or with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steadytorch.graphs.data_parallel import WARM_UP
from steadytorch.ranks.checkpoints import AHEAD, EVERY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

SCRIPT = Path(__file__).with_name("ddp_ranked.py")
STEPS, FAULT_AT = 200, 60
CLASS_ERROR = 1e-3
"""Relative L2 error of the parameters after 200 steps of class `same`."""


def run(folder, name, scope="step", case="served"):
    """What each of two ranks found."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *torchrun, SCRIPT, folder, name, scope, case],
        env={**os.environ, "STEADYTORCH_RANKS_DEADLINE": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    print(json.dumps(found, indent=1))
    return found


def assert_trained(found):
    for each in found:
        assert each["equal"]
        assert each["error"] < CLASS_ERROR
        assert each["replays"] + sum(each["eager"].values()) == STEPS


@pytest.mark.parametrize("name", ["conv", "transformer"])
@pytest.mark.parametrize("scope", ["step", "update", "backward"])
def test_recorded_steps_train_as_plain_ddp_does(tmp_path, name, scope):
    found = run(tmp_path, name, scope)
    assert_trained(found)
    assert found[0]["replays"] == found[1]["replays"]
    for each in found:  # recorded, or the reason is counted
        assert each["replays"] == STEPS - WARM_UP or any(
            "eager" in reason or "recorded" in reason for reason in each["eager"]
        )


def test_whole_steps_are_recorded(tmp_path):
    found = run(tmp_path, "conv")
    assert [each["replays"] for each in found] == [STEPS - WARM_UP] * 2


@pytest.mark.slow
def test_compiled_steps_are_recorded(tmp_path):
    found = run(tmp_path, "transformer", "compiled step")
    for each in found:
        assert each["equal"]
        assert each["replays"] + sum(each["eager"].values()) == STEPS
    assert found[0]["replays"] == found[1]["replays"]


def test_a_step_of_another_shape_on_one_rank_runs_eagerly_there(tmp_path):
    found = run(tmp_path, "conv", case="shapes")
    assert all(each["equal"] for each in found)
    assert found[0]["replays"] >= found[1]["replays"]


def test_a_fault_on_one_rank_ends_graphs_and_plan_on_all_at_one_step(tmp_path):
    found = run(tmp_path, "conv", case="fault")
    assert_trained(found)
    agreed = (FAULT_AT // EVERY + AHEAD) * EVERY
    assert found[1]["off_since"] == FAULT_AT
    assert agreed <= found[0]["off_since"] + 1 <= agreed + EVERY
    assert "ended on all ranks (rank 1" in found[0]["off"]
