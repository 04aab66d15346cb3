"""One search on two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from steadytorch import Workload, tune
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.tune.devices import choose_devices
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


def workload():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    return Workload(nn.Sequential(*layers).eval(), torch.randn(8, 3, 64, 64))


def test_two_gpus_share_one_search(tmp_path):
    devices = choose_devices("cuda:0,cuda:1", None, "cuda:0")
    options = SearchOptions(budget_s=60.0)
    session = Session(workload(), options, store=tmp_path, devices=devices)
    result = session.search()
    assert result.devices == ("cuda:0", "cuda:1")
    assert result.devices_left_out == {}
    assert result.speedup.verdict in ("faster", "untouched")
    assert sum(trial.samples > 0 for trial in result.candidates) >= 3
    assert set(result.timed_on.values()) <= {"cuda:1"}


def test_a_plan_of_two_gpus_serves_on_either(tmp_path):
    made = workload()
    plan = tune(made, devices=["cuda:1", "cuda:0"], budget="45s", store=tmp_path)
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(device), torch.no_grad():
            model, x = made.model.to(device), made.inputs[0].to(device)
            fast = plan.apply(model)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)


def test_a_gpu_given_twice_and_one_that_is_missing_are_refused():
    with pytest.raises(UsageError, match="cuda:0 is given twice"):
        choose_devices("cuda:0,cuda:0", None, "cuda:0")
    with pytest.raises(UnsupportedError, match="cuda:99"):
        choose_devices("cuda:0,cuda:99", None, "cuda:0")


def test_the_search_of_the_first_rank_uses_the_gpus_of_all(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *torchrun, Path(__file__).with_name("tune_ranked.py"), tmp_path],
        env={**os.environ, "STEADYTORCH_RANKS_DEADLINE": "120"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["plan"] == found[1]["plan"]
    assert all(each["close"] for each in found)
    assert "searching on cuda:0, cuda:1 for all ranks" in found[0]["said"]
    assert not any("searching" in line for line in found[1]["said"])


def test_all_starts_with_the_workloads_gpu():
    found = choose_devices("all", None, "cuda:0")
    assert found.names[0] == "cuda:0" or "cuda:0" in found.left_out
