"""Plans under torchrun: every rank serves the same plan, and trains in step with the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from steadytorch.plan.fingerprint import trained_fingerprint, workload_fingerprint
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec

from .plans import make_plan
from .ranked import STEPS, make_net, make_workload

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
    key = replace(plan.key, workload=workload_fingerprint(workload))
    plan = replace(plan, key=key, trains=trained_fingerprint(workload.untouched))
    made = Store(tmp_path / "plans", second="")
    assert made.put(key, plan) is not None
    return made


def run(store, folder, ranks, without=()):
    """What each rank found."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = subprocess.run(
        [sys.executable, *torchrun, SCRIPT, store.root, folder, *map(str, without)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("without", [(1,), ()], ids=["one without", "all with a plan"])
@pytest.mark.sampled(every=2)
def test_ranks_train_in_step_with_or_without_a_plan(store, tmp_path, without):
    found = run(store, tmp_path, 2, without)
    for rank, each in enumerate(found):
        assert each["calls"] == ({} if rank in without else {"tuned": STEPS})
        assert each["weights"] == found[0]["weights"]
    torch.testing.assert_close(
        torch.tensor(found[0]["weights"]), torch.tensor(found[0]["untouched"])
    )
