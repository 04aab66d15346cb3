from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from steadytorch.plan import bundle
from steadytorch.plan.plan import Plan
from steadytorch.transforms.base import Candidate, TransformSpec
from steadytorch.tune.bundle import keep_bundle
from steadytorch.tune.result import TuneResult
from steadytorch.tune.select import Options
from steadytorch.tune.session import Session
from steadytorch.workload.workload import Workload

COMPILE = (TransformSpec("compile", (("mode", "default"), ("freezing", True))),)

USE = """
import logging, sys
from pathlib import Path
import torch
from torch import nn
import steadytorch as steady
from steadytorch.plan import bundle
from steadytorch.plan.plan import load_plan

logging.basicConfig(level=logging.WARNING)
plan, cache = load_plan(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.ones(2, 8)
fast = steady.optimize(model, store=Path(sys.argv[1]).parents[1], canary=False, bundle=True)
assert bundle.unpack(plan) is None
kept = set(cache.rglob("*.so"))
assert kept
torch.testing.assert_close(fast(x), model(x))
assert fast.report().hits == 1, fast.report()
assert set(cache.rglob("*.so")) == kept, "compiled anew"
"""


def _workload() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), (torch.ones(2, 8),))


def _stored(workload: Workload, store, candidate: Candidate) -> Plan:
    """A plan under the key of a search, as if that had chosen the candidate."""
    from steadytorch.measure.measurement import summarize
    from steadytorch.plan.plan import Speedup

    timing = summarize([1000] * 20, "latency")
    found = TuneResult(
        baseline=timing,
        winner=timing,
        chosen=candidate,
        regime="memory-bound",
        candidates=(),
        not_applicable={},
        not_tried={},
        speedup=Speedup(1.0, None, None, "process", "tie", 0),
        break_even_calls=None,
        reference="float64",
        seconds=1.0,
    )
    return Session(workload, Options(), "cpu", store).keep(found)


@pytest.mark.compiles
def test_a_fresh_process_compiles_no_kernel_that_the_bundle_holds(tmp_path):
    plan = _stored(_workload(), tmp_path / "plans", COMPILE)
    assert keep_bundle(plan, _workload(), "cpu") is None
    assert plan.path is not None
    cache = tmp_path / "inductor"
    done = subprocess.run(
        [sys.executable, "-c", USE, plan.path, str(cache)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compiled anew" not in done.stderr


def test_a_plan_that_compiles_nothing_has_no_bundle(tmp_path):
    plan = _stored(_workload(), tmp_path, (TransformSpec("inference_mode"),))
    assert keep_bundle(plan, _workload(), "cpu") == "the plan compiles nothing"
    assert not list(tmp_path.rglob("*.bundle"))


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such thing")


def test_a_worker_that_fails_is_a_reason(tmp_path, caplog):
    plan = _stored(_workload(), tmp_path, COMPILE)
    reason = keep_bundle(plan, Workload(_Fails().eval(), (torch.ones(2, 8),)), "cpu")
    assert "its worker failed" in (reason or "")
    assert [r.getMessage() for r in caplog.records] == [f"no bundle for plan {plan.id}: {reason}"]


def test_a_plan_without_its_bundle_is_served_all_the_same(tmp_path, caplog):
    import steadytorch as steady

    workload = _workload()
    plan = _stored(workload, tmp_path, (TransformSpec("inference_mode"),))
    fast = steady.optimize(workload.model, store=tmp_path, bundle=True, canary=False)
    torch.testing.assert_close(fast(*workload.inputs), workload.model(*workload.inputs))
    assert fast.report().hits == 1
    assert bundle.fault(plan) == "it has no bundle"
    assert not caplog.records


def test_nothing_is_unpacked_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    workload = _workload()
    plan = _stored(workload, tmp_path / "plans", COMPILE)
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "kernel.so").write_bytes(b"code")
    bundle.write(plan, tmp_path / "compiled")
    assert plan.resolution().candidate == COMPILE
    assert not (tmp_path / "inductor").exists()
    plan.resolution(bundle=True)
    assert (tmp_path / "inductor" / "kernel.so").read_bytes() == b"code"
