"""Real plans of a small network, for the tests beside."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from steadytorch.device.facts import load_facts
from steadytorch.plan.files import encoded
from steadytorch.plan.fingerprint import canonical_json, make_key
from steadytorch.plan.record import Evidence, Speedup, Timing, Trial
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.transforms import ambient
from steadytorch.workload.workload import Workload

CANDIDATE = (TransformSpec("channels_last"), TransformSpec("inference_mode"))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


def make_evidence():
    timing = Timing("latency", 1e6, (0.9e6, 1.1e6), 1.2e6, None, 150)
    return Evidence(
        baseline=timing,
        winner=timing,
        speedup=Speedup(1.5, 1.4, 1.6, "process", "faster", 20),
        break_even_calls=1000,
        regime="memory-bound",
        reference="float64",
        trials=(
            Trial(transforms=(), median_ns=1.5e6, samples=30),
            Trial(transforms=CANDIDATE, median_ns=1e6, setup_s=0.5, error=1e-7, samples=30),
            Trial(transforms=(TransformSpec("tf32"),), status="failed", reason="no"),
        ),
        not_applicable={"cuda_graph": "no CUDA device"},
        not_tried={"compile": "budget exhausted"},
        search_s=12.5,
    )


def make_plan(model, x, candidate=CANDIDATE):
    workload = Workload(model, x)
    key = make_key(
        workload,
        workload.signature(),
        load_facts("cpu"),
        objective="latency",
        precision="same",
        tolerance=None,
        max_memory_bytes=None,
        ambient=ambient(),
    )
    return Plan(
        name="net",
        signature=workload.signature(),
        candidate=candidate,
        evidence=make_evidence(),
        key=key,
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
    )


def write(folder: Path, plan: Plan) -> Path:
    path = folder / "plan.json"
    path.write_bytes(encoded(plan.key, plan))
    return path


def sealed(payload: object, key: object) -> bytes:
    """A file with a valid digest for any content, as an attacker would write it."""
    return digested(canonical_json({"key": key, "payload": payload, "schema": 1}))


def digested(body: bytes) -> bytes:
    return body[:-1] + b',"sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def reason_untouched(tuned, model, x):
    assert torch.equal(tuned(x), model(x))
    (reason,) = tuned.report().calls
    return reason.removeprefix("untouched: ")
