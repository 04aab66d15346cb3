"""Find other processes that compute on the same GPU."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.traces.events import Category
from steadytorch.traces.steps import gpu_rows

NAME = "neighbour-process"
LEAST_SLOWDOWN = 0.03
"""Minimum slowdown of samples with a neighbour over those without."""
CERTAIN = 0.01
"""Maximum p-value of the rank test."""
FEWEST = 5
"""Minimum samples with and without a neighbour for a comparison; also minimum launches of a
kernel."""
LEAST_STRETCH = 0.3
"""Minimum share of kernel time beyond each kernel's best: at 30 %, a kernel runs at 0.7 of its
best speed."""


def rule(case: Case) -> Verdict:
    """Report other processes that the driver lists on this GPU.

    The driver shows which processes hold a CUDA context, not whether they compute. The cost is
    estimated from samples with and without another process on the GPU. A second sign is kernels
    slower than the best launch of the same kernel, since processes take turns on the GPU. CUDA
    contexts of the measurement's own processes (`own_contexts` in the notes), such as that of the
    caller, do not count.

    Source: "nvmlDeviceGetComputeRunningProcesses", NVML API reference; "Compute modes", CUDA
    Programming Guide.
    """
    samples = samples_of(case)
    if samples is not None and not samples.on_gpu:
        return ()
    others = None if samples is None else samples.level("other_gpu_processes")
    if samples is None or others is None:
        return unrecorded(NAME, samples, "other_gpu_processes", "GPU use by other processes")
    own = (case.notes or {}).get("own_contexts")
    others = (others - (own if isinstance(own, int) else 0)).clip(min=0)
    if not others.any():
        return ()
    share = float(np.mean(others > 0))
    most = many(int(others.max()), "other process").replace("processs", "processes")
    lines = [f"{most} on the GPU during {percent(share)} of the samples"]
    slower, varies = _slower(samples, others > 0)
    stretch = _stretch(case)
    if slower:
        lines.append(f"samples with a neighbour take {percent(slower)} longer (median)")
    if stretch >= LEAST_STRETCH:
        lines.append(
            f"{percent(stretch)} of kernel time exceeds the best launch of the same kernel"
        )
    shown = bool(slower) or stretch >= LEAST_STRETCH
    step = samples.median_ns / samples.group
    cost = round(step * (slower / (1 + slower) * share if slower else stretch if shown else 0.0))
    sign = "" if shown else "; no slowdown seen"
    return (
        Finding(
            id=NAME,
            source="hardware contention",
            title=f"{most} on this GPU" + (f": {duration(cost)} a step" if cost else sign),
            evidence=tuple(lines),
            slices=("gpu_kernel",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=varies,
            confidence="high" if slower else "medium" if shown else "low",
            fix="Use a GPU without other processes: choose one with CUDA_VISIBLE_DEVICES, end "
            "leftover processes, or partition the GPU with MIG.",
            check="`nvidia-smi --query-compute-apps=pid,name --format=csv` lists one process",
            false_alarm="the other process only holds memory and computes nothing (an open "
            "notebook, an idle server).",
        ),
    )


def _slower(samples: Samples, company: np.ndarray) -> tuple[float, float | None]:
    """Slowdown of samples by another process on the GPU, and its share of the variance."""
    times = samples.durations_ns
    if min(company.sum(), (~company).sum()) < FEWEST:
        return 0.0, None
    from scipy.stats import mannwhitneyu

    slower = float(np.median(times[company]) / np.median(times[~company])) - 1
    chance = float(mannwhitneyu(times[company], times[~company], alternative="greater").pvalue)
    if slower < LEAST_SLOWDOWN or chance > CERTAIN:
        return 0.0, None
    means = np.where(company, times[company].mean(), times[~company].mean())
    return slower, float(means.var() / times.var())


def _stretch(case: Case) -> float:
    """Share of kernel time that exceeds the fastest decile of the same kernel's launches."""
    if case.trace is None or case.ledger is None or case.ledger.kind != "gpu":
        return 0.0
    events = case.trace.events
    rows = gpu_rows(case.trace, case.ledger.device)
    rows = rows[events.category[rows] == Category.KERNEL]
    keys = np.stack([events.name[rows], events.details[rows]])
    _, kind = np.unique(keys, axis=1, return_inverse=True)
    lengths = events.end_ns[rows] - events.start_ns[rows]
    beyond = total = 0.0
    order = np.argsort(kind.ravel(), kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(kind.ravel()[order])) + 1):
        if len(group) >= FEWEST:
            mine = lengths[group]
            beyond += float((mine - np.quantile(mine, 0.1)).clip(min=0).sum())
            total += float(mine.sum())
    return beyond / total if total else 0.0
