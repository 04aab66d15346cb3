"""Explanations as scripted values."""

from __future__ import annotations

import msgspec

from steadytorch.device.facts import DeviceFacts
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

from .measured import MS, series

SLICES = {
    "gpu_kernel": 60 * MS,
    "gpu_memcpy": 5 * MS,
    "idle_data_wait": 0,
    "idle_launch": 30 * MS,
    "idle_gc": MS // 10,
    "unknown": 4 * MS + MS * 9 // 10,
}


def finding(name="launch-bound", hi=30 * MS, **fields):
    defaults = {
        "id": name,
        "source": "kernel-launch overhead",
        "title": "the GPU waits for launches 30 ms of a step",
        "evidence": ("60 kernels a step", "5 us each"),
        "recoverable_ns": (0, hi),
        "confidence": "high",
        "fix": "Launch many kernels at once.",
        "transforms": ("cuda_graph", "compile"),
        "check": "steady explain WORKLOAD",
        "false_alarm": "the profiler slowed the host",
    }
    return Finding(**{**defaults, **fields})


def line(name="gemm", time_ns=120 * MS, **fields):
    defaults = {"count": 40, "share": 0.5, "known_ns": time_ns}
    return Line(name=name, time_ns=time_ns, **{**defaults, **fields})


ROOFLINE = Roofline(
    lines=(
        line("void at::native::elementwise<4>(int)", share_of_limit=0.62, bound="memory"),
        line("gemm", 60 * MS),
    ),
    steps=2,
    busy_ns=65 * MS,
    known_ns=60 * MS,
    least_ns=37 * MS,
    share_of_limit=0.62,
)
FULL = Explanation(
    source="capture",
    environment=DeviceFacts(device="cuda", name="H200"),
    regime="launch-bound",
    steps=(StepTime(2, 100 * MS, SLICES), StepTime(3, 100 * MS, SLICES)),
    gpu=GpuTotals(130 * MS, 70 * MS, 200 * MS),
    variance_shares={"gpu_kernel": 0.6, "idle_launch": 0.4},
    kernel_variance=KernelSplit(0.1, 0.5),
    slowest=(SlowStep(1, "ProfilerStep#3", 103 * MS, 3 * MS, ("idle_launch 33 ms",)),),
    findings=(finding(), finding("queue-full", 0, information=True, transforms=())),
    abstained=(
        Abstention("gc-pause", "not recorded", "record it"),
        Abstention("idle-ramp", "not recorded", "record it"),
        Abstention("copies", "no GPU", "take one"),
    ),
    roofline=ROOFLINE,
    measured=series(95 * MS),
    distortion=1.05,
)


def explained(**fields):
    return msgspec.structs.replace(FULL, **fields)
