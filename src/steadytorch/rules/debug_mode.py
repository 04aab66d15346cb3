"""Find debugging modes of PyTorch that are left on."""

from __future__ import annotations

from steadytorch.findings.figures import percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict

NAME = "debug-mode"
LEAST_SHARE = 0.5
"""Minimum share of the samples in which the mode is on: short inspections are no fault."""


def rule(case: Case) -> Verdict:
    """Report debugging modes that slow each step: anomaly detection, profiler, blocking launches.

    Source: "Disable debugging APIs", PyTorch Performance Tuning Guide; CUDA_LAUNCH_BLOCKING, CUDA
    C++ Programming Guide.
    """
    steps = case.watched
    if steps is None:
        return Abstention(NAME, "no script was watched", "run `steady run SCRIPT`")
    on = [(name, part) for name, part in steps.setting.modes if part >= LEAST_SHARE]
    if not on:
        return ()
    names = ", ".join(name for name, _ in on)
    affected = round(sum(steps.mean(name) for name in ("forward", "backward")))
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"a debugging mode is on: {names}",
            evidence=tuple(f"{name}: on in {percent(part)} of the samples" for name, part in on),
            cost_ns=affected,
            recoverable_ns=(0, affected),
            confidence="high",
            fix="Turn it off, or on for a few steps only.",
            check="run `steady run SCRIPT` again without it",
            false_alarm="the run is meant for debugging.",
        ),
    )
