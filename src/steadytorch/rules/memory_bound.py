"""Find operators that memory bandwidth limits, according to the roofline model."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, PROFILE, SHAPES
from steadytorch.findings.optimizer_steps import is_training
from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.launches import launches_of, operators_of
from steadytorch.rates.operator_work import MATRIX
from steadytorch.rates.roofline import FROM_CACHE, Line, roofline
from steadytorch.traces.events import Trace
from steadytorch.traces.kernel_names import is_product, short

NAME = "memory-bound"
LEAST_OF_BANDWIDTH = 0.6
"""Minimum share of the measured bandwidth. Below 60 % of the peak, NVIDIA Nsight Compute blames
latency, not bandwidth (its rule on "GPU speed of light throughput")."""
LEAST_BYTES = 1 << 20
"""Minimum bytes per call. Less fits in a core's cache and says nothing about memory."""
LEAST_SHARE = 0.1
"""Minimum share of kernel time. Fusing less changes a step by less than its noise."""
LEAST_KNOWN = 0.2
"""Minimum share of kernel time with known work for the rule to judge."""

_ON_CPU = ("cpu_elementwise", "cpu_copy", "cpu_operator", "cpu_compute")


def rule(case: Case) -> Verdict:
    """Report kernels near the measured memory bandwidth: only moving less data speeds them up.

    Source: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009.
    Source of the fix: "Fuse operations", PyTorch Performance Tuning Guide.
    """
    if case.trace is None or case.ledger is None:
        return Abstention(NAME, "no steps were profiled", PROFILE)
    if case.rates is None or case.rates.copy_bandwidth_bytes_per_s is None:
        return Abstention(NAME, "the device's bandwidth was not measured", _MEASURE)
    seen = roofline(case.trace, case.rates, case.ledger)
    total = max(1, sum(line.time_ns for line in seen.lines))
    if sum(line.known_ns for line in seen.lines) < LEAST_KNOWN * total:
        why = "shapes or formulas are unknown for most of the kernel time"
        return Abstention(NAME, why, SHAPES)
    found = [line for line in seen.lines if _is_bound(line)]
    cost = sum(line.time_ns for line in found)
    if cost <= LEAST_SHARE * total:
        return ()
    fusable = sum(line.time_ns for line in found if not _multiplies(line))
    bandwidth = case.rates.copy_bandwidth_bytes_per_s
    halves = ", or compute in 16 bits" if _is_wide(case.trace, case.ledger, found) else ""
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"memory-bound: kernels above {percent(LEAST_OF_BANDWIDTH)} of the measured "
            f"{bandwidth / 1e9:.4g} GB/s take {percent(cost / total)} of the work",
            evidence=tuple(map(_described, found[:3])),
            slices=("gpu_kernel",) if case.ledger.kind == "gpu" else _ON_CPU,
            cost_ns=cost // seen.steps,
            recoverable_ns=(0, fusable // seen.steps),
            confidence="medium",
            fix="Move fewer bytes: fuse neighbouring elementwise operators (torch.compile)"
            f"{halves}.",
            transforms=("compile", *(_halving(case) if halves else ())),
            check=CHECK,
            false_alarm="the operators have no neighbour to fuse with, or their data stays in "
            "cache (more than 100 % of the limit).",
        ),
    )


def _is_bound(line: Line) -> bool:
    near = LEAST_OF_BANDWIDTH < (line.share_of_limit or 0.0) <= FROM_CACHE
    large = (line.bytes or 0) >= LEAST_BYTES * line.count
    return near and large and line.bound == "memory" and line.known_ns > line.time_ns / 2


def _is_wide(trace: Trace, ledger: Ledger, lines: list[Line]) -> bool:
    """Whether operators of these lines move floating-point numbers that 16 bits make smaller."""
    names = {line.name for line in lines}
    operators = operators_of(trace)
    if ledger.kind == "gpu":
        seen = launches_of(trace, ledger)
        rows = seen.operator[seen.named(names.__contains__) & (seen.operator >= 0)]
    else:
        rows = np.flatnonzero(operators.named(names))
    index, works = operators.works
    owner = operators.charged[rows]
    found = [works[place] for place in np.unique(index[owner[owner >= 0]])]
    return any(w.dtype in ("float32", "float64") and w.bytes >= LEAST_BYTES for w in found)


def _halving(case: Case) -> tuple[str, ...]:
    return ("autocast",) if is_training(case) else ("cast_weights", "autocast")


def _multiplies(line: Line) -> bool:
    return line.name in MATRIX or is_product(line.name)


def _described(line: Line) -> str:
    return (
        f"{short(line.name)}: {percent(line.share)} of the work, "
        f"{(line.bytes_per_s or 0) / 1e9:.4g} GB/s, {duration(line.time_ns / max(1, line.count))} "
        f"each, {percent(line.share_of_limit or 0)} of the limit"
    )


_MEASURE = (
    "run `steady explain WORKLOAD` on the device: it measures the bandwidth, which a trace file "
    "lacks"
)
