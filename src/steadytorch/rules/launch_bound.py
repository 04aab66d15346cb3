"""Find a GPU that idles because the host launches kernels too slowly."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, many, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, busy_ns, gpu_launches, per_step, step_ns
from steadytorch.findings.optimizer_steps import is_training
from steadytorch.rates.launches import Launches
from steadytorch.traces.events import Category

NAME = "launch-bound"
SHORT_KERNEL_NS = 10_000
"""A launch costs the host 5 to 20 us (HolisticTraceAnalysis, "CUDA kernel launch statistics"):
shorter kernels end before the next launch."""
FEWEST = 5
"""Minimum kernels for a meaningful mean."""
LEAST_SHARE = 0.15
"""Minimum share of the step that the GPU idles for launches."""
CLEAR_SHARE = 0.3
"""Share of the step from which launching is the bottleneck, however long the kernels."""


def rule(case: Case) -> Verdict:
    """Report idle time between short kernels while the GPU waits for launches.

    Source: NVIDIA, "Getting started with CUDA graphs"; PyTorch "Performance Tuning Guide", reduce
    the overhead of launches with CUDA graphs. There is no finding if timing without the profiler
    shows that the GPU is busy.
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    kernels = seen.of(Category.KERNEL)
    length = seen.length_ns[kernels]
    share = seen.ledger.share("idle_launch")
    if len(length) < FEWEST or share <= LEAST_SHARE:
        return ()
    mean = float(length.mean())
    short = min(mean, float(np.median(length))) < SHORT_KERNEL_NS
    if not short and share <= CLEAR_SHARE:
        return ()
    cost = round(seen.ledger.mean("idle_launch"))
    unprofiled = _idle_unprofiled_ns(case, seen)
    most = cost if unprofiled is None else min(cost, unprofiled)
    if unprofiled is not None and unprofiled <= LEAST_SHARE * (unprofiled + busy_ns(seen.ledger)):
        return ()
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"launch-bound: the GPU waits for launches for {duration(cost)} of a step of "
            f"{duration(step_ns(seen.ledger))} ({percent(share)})",
            evidence=_evidence(seen, kernels, mean, unprofiled),
            slices=("idle_launch",),
            cost_ns=cost,
            recoverable_ns=(0, most),
            variance_share=variance_of(case, "idle_launch"),
            confidence="high" if short and share > CLEAR_SHARE else "medium",
            fix="Launch many kernels at once with a CUDA graph, or fuse them with torch.compile. "
            "A larger batch gives each kernel more work.",
            transforms=("compile",) if is_training(case) else ("cuda_graph", "compile"),
            check=CHECK,
            false_alarm="the profiler slowed the host (Python stacks most of all): compare with "
            "the unprofiled time.",
        ),
    )


def _evidence(
    seen: Launches, kernels: np.ndarray, mean: float, unprofiled: int | None
) -> tuple[str, ...]:
    calls = seen.call[seen.call >= 0]
    events = seen.trace.events
    held = float((events.end_ns[calls] - events.start_ns[calls]).mean()) if len(calls) else 0.0
    graphs = seen.called(lambda name: "GraphLaunch" in name).any()
    gpu = seen.ledger.gpu
    idle = percent(gpu.idle_ns / gpu.total_ns) if gpu is not None and gpu.total_ns else ""
    lines = [
        f"{many(per_step(seen, kernels), 'kernel')} a step, {duration(mean)} each on average",
        f"the GPU is idle {idle} of the time between its first and last event" if idle else "",
        f"a launch takes the host {duration(held)} on average" if held else "",
        "CUDA graphs already launch some of the work" if graphs else "",
    ]
    if unprofiled is not None:
        lines.append(f"without the profiler the GPU is idle for {duration(unprofiled)} of a step")
    return tuple(line for line in lines if line)


def _idle_unprofiled_ns(case: Case, seen: Launches) -> int | None:
    """Step period without the profiler minus GPU busy time, in ns; None if not measured."""
    if case.measured is None:
        return None
    return max(0, round(case.measured.period.median_ns - busy_ns(seen.ledger)))
