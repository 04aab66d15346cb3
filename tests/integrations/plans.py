"""Plans made without a search, for the tests of trainers."""

from __future__ import annotations

from msgspec.structs import replace

from steadytorch.device.facts import load_facts
from steadytorch.plan.fingerprint import make_key, trained_fingerprint
from steadytorch.results.candidate import TransformSpec
from steadytorch.serve.plan import Plan
from steadytorch.transforms import ambient

from ..tune.stored import evidence

CHANNELS_LAST = (TransformSpec("channels_last"),)


def plan_of(workload, candidate=CHANNELS_LAST):
    """A plan of a workload, for inference or training."""
    signature = workload.signature()
    key = make_key(
        workload,
        signature,
        load_facts("cpu"),
        objective="throughput" if workload.is_training else "latency",
        precision="same",
        tolerance=None,
        max_memory_bytes=None,
        ambient=ambient(),
    )
    plan = Plan(
        name="net",
        signature=signature,
        candidate=candidate,
        evidence=evidence(),
        key=key,
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
    )
    trains = trained_fingerprint(workload.untouched) if workload.is_training else None
    return replace(plan, trains=trains)
