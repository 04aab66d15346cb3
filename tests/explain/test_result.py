from __future__ import annotations

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.measure.measurement import summarize
from steadytorch.results.explain import (
    Abstention,
    Explanation,
    Finding,
    GpuTotals,
    KernelSplit,
    Line,
    Roofline,
    SlowStep,
    StepTime,
)

FINDING = Finding(
    id="launch-bound",
    source="kernel-launch overhead",
    title="the GPU waits",
    evidence=("60 kernels",),
    recoverable_ns=(0, 700),
    fix="Use a CUDA graph.",
    transforms=("cuda_graph",),
    check="steady explain WORKLOAD",
    false_alarm="never",
)
FULL = Explanation(
    source="capture",
    environment=DeviceFacts(device="cuda", name="H200"),
    regime="launch-bound",
    steps=(
        StepTime(2, 1000, {"gpu_kernel": 300, "idle_launch": 700}),
        StepTime(3, 2000, {"gpu_kernel": 300, "idle_launch": 1700}),
    ),
    gpu=GpuTotals(600, 2400, 3000),
    variance_shares={"gpu_kernel": 0.0, "idle_launch": 1.0},
    kernel_variance=KernelSplit(0.0, 0.0),
    slowest=(SlowStep(1, "ProfilerStep#3", 2000, 500, ("idle_launch 1700 ns",)),),
    findings=(FINDING,),
    abstained=(Abstention("gc-pause", "not recorded", "record it"),),
    roofline=Roofline(
        lines=(Line(name="gemm", count=4, time_ns=600, share=1.0, known_ns=0),),
        steps=2,
        busy_ns=300,
        known_ns=0,
        least_ns=0,
    ),
    measured=summarize(list(range(1000, 1100))),
    distortion=1.25,
    notes={"threads": 2, "pause_probe": {"after_ns": [1, 2]}},
    problems=("cut off",),
    remarks=("stacks were recorded",),
)


def test_an_explanation_survives_json():
    assert msgspec.json.decode(msgspec.json.encode(FULL), type=Explanation) == FULL


def test_the_promised_fields_are_there():
    found = msgspec.json.decode(msgspec.json.encode(FULL))
    assert found["steps"][0] == {
        "index": 2,
        "total_ns": 1000,
        "slices_ns": {"gpu_kernel": 300, "idle_launch": 700},
    }
    assert found["gpu"] == {"busy_ns": 600, "idle_ns": 2400, "total_ns": 3000}
    assert sum(found["variance_shares"].values()) == 1
    assert found["findings"][0].keys() >= {
        *("id", "source", "evidence", "recoverable_ns", "variance_share"),
        *("confidence", "fix", "transforms"),
    }
    assert found["abstained"] == [
        {"rule": "gc-pause", "why": "not recorded", "recapture": "record it"}
    ]


def test_mean_slices_add_up_to_the_mean_step():
    assert FULL.step_ns == 1500
    assert FULL.mean_slices_ns() == {"gpu_kernel": 300, "idle_launch": 1200}


def test_without_steps_there_is_no_time():
    bare = Explanation(source="x", environment=DeviceFacts(device="cpu"), regime="unclassified")
    assert (bare.step_ns, bare.mean_slices_ns()) == (0, {})
