"""Other processes compute on the same GPU."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.samples import Samples, samples_of, unrecorded
from steadytorch.traces.events import Category
from steadytorch.traces.steps import gpu_rows

NAME = "neighbour-process"
LEAST_SLOWDOWN = 0.03
"""Of samples with a neighbour over those without, to say that it costs something."""
CERTAIN = 0.01
"""Chance of so clear a difference between samples that do not differ."""
FEWEST = 5
"""Samples with and without a neighbour, to compare them; launches of a kernel, likewise."""
LEAST_STRETCH = 0.3
"""Of kernel time beyond each kernel's best: 30 % is the same kernel at 0.7 of its best speed."""


def rule(case: Case) -> Verdict:
    """Processes that the driver lists beside this one; without any there is no finding.

    The driver says that they hold a context, not that they compute. So what they cost is shown
    where it can be: samples with a neighbour against those without, or kernels that take longer
    than the best launch of the same kernel, since the GPU is shared by turns. Contexts of the
    session's own processes (`own_contexts` in the notes), as of a caller that holds the model on
    the GPU, are no neighbours.

    Source: "nvmlDeviceGetComputeRunningProcesses", NVML API reference; "Compute modes", CUDA
    Programming Guide.
    """
    samples = samples_of(case)
    if samples is not None and not samples.on_gpu:
        return ()
    others = None if samples is None else samples.level("other_gpu_processes")
    if samples is None or others is None:
        return unrecorded(NAME, samples, "other_gpu_processes", "who else uses the GPU")
    own = (case.notes or {}).get("own_contexts")
    others = (others - (own if isinstance(own, int) else 0)).clip(min=0)
    if not others.any():
        return ()
    share = float(np.mean(others > 0))
    most = many(int(others.max()), "other process").replace("processs", "processes")
    lines = [f"{most} on the GPU, during {percent(share)} of the samples"]
    slower, varies = _slower(samples, others > 0)
    stretch = _stretch(case)
    if slower:
        lines.append(f"samples with company take {percent(slower)} longer at the median")
    if stretch >= LEAST_STRETCH:
        lines.append(
            f"{percent(stretch)} of kernel time is beyond the best launch of the same kernel"
        )
    shown = bool(slower) or stretch >= LEAST_STRETCH
    step = samples.median_ns / samples.group
    cost = round(step * (slower / (1 + slower) * share if slower else stretch if shown else 0.0))
    sign = "" if shown else "; whether it computes was not seen"
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
            fix="Run on a GPU of its own: choose another with CUDA_VISIBLE_DEVICES, end what is "
            "left over, or divide the GPU with MIG.",
            check="`nvidia-smi --query-compute-apps=pid,name --format=csv` lists one process",
            false_alarm="the other process only holds memory and computes nothing (an open "
            "notebook, an idle server).",
        ),
    )


def _slower(samples: Samples, company: np.ndarray) -> tuple[float, float | None]:
    """How much longer samples with a neighbour take, and their share of the variance."""
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
    """Of kernel time, what lies beyond the best tenth of the launches of the same kernel."""
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
