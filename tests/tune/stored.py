"""Plans in a store, made without a search, for tests of serving."""

from __future__ import annotations

import torch
from torch import nn

from steadytorch import transforms
from steadytorch.device.facts import load_facts
from steadytorch.plan.fingerprint import make_key
from steadytorch.plan.record import Evidence, Speedup, Timing
from steadytorch.plan.store import Store
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.workload.workload import Workload

CANDIDATE = (TransformSpec("inference_mode"),)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval()


def evidence():
    slow, fast = (Timing("latency", ns, None, ns, None, 10) for ns in (2e6, 1e6))
    return Evidence(
        baseline=slow,
        winner=fast,
        speedup=Speedup(2.0, 1.9, 2.1, "process", "faster", 12),
        break_even_calls=3,
        regime="launch-bound",
        reference="float64",
        trials=(),
        not_applicable={},
        not_tried={},
        search_s=1.0,
    )


def make_plan(model, x, candidate=CANDIDATE, **asked):
    workload = Workload(model, (x,))
    asked = {
        "objective": "latency",
        "precision": "same",
        "tolerance": None,
        "max_memory_bytes": None,
        **asked,
    }
    signature = workload.signature()
    key = make_key(workload, signature, load_facts("cpu"), ambient=transforms.ambient(), **asked)
    return Plan(
        name="net",
        signature=signature,
        candidate=candidate,
        evidence=evidence(),
        key=key,
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
    )


def store_plan(folder, plan):
    assert Store(folder).put(plan.key, plan)
    return folder


def equal(tuned, model, x):
    with torch.no_grad():
        return torch.equal(tuned(x), model(x))
