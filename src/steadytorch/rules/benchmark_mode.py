"""Report how cuDNN's benchmark mode affects a workload with fixed shapes; information only."""

from __future__ import annotations

from typing import Any

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, no_trace
from steadytorch.findings.host_calls import steps_of
from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.launches import launches_of, operators_of
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.evidence import by_name
from steadytorch.traces.steps import CALLS

NAME = "benchmark-mode"
LEAST_SHARE = 0.1
"""Minimum share of kernel time in convolutions. Below it, other engines change a step little."""

_CONVOLUTION = r"aten::(cudnn_convolution\w*|convolution_backward)"
_BACKWARD = "aten::convolution_backward"
_GRAPH = r"(cuda|cu)GraphLaunch\w*"


def rule(case: Case) -> Verdict:
    """Report if benchmark mode has no effect, came too late, or is off with costly convolutions.

    Benchmark mode chooses engines only for convolutions that cuDNN runs, at shapes that have not
    run before. PyTorch caches one engine per shape, even if it was chosen without benchmark mode
    (`Conv_v8.cpp`). With benchmark mode off, PyTorch takes the first engine that cuDNN's heuristics
    suggest. The rule `autotuning-in-loop` covers changing input shapes.

    Source: "Enable cuDNN auto-tuner", PyTorch Performance Tuning Guide; `torch.backends.cudnn`,
    PyTorch documentation.
    """
    if case.trace is None or case.ledger is None:
        return no_trace(NAME, "convolutions")
    notes = case.notes or {}
    mode, rows = notes.get("cudnn_benchmark"), by_name(case.trace, (Category.CPU_OP,), _CONVOLUTION)
    if mode is None:
        return _mode_unknown() if len(rows) else ()
    if not mode:
        return _first_suggestions(case.trace, case.ledger, rows)
    if (why := _nothing_to_choose(case.trace, case.ledger, rows)) is not None:
        return (
            _information(
                title=f"benchmark mode is on but has nothing to choose: {why}",
                evidence=("torch.backends.cudnn.benchmark was on", why),
                confidence="high",
                fix="Leave torch.backends.cudnn.benchmark off: it changes nothing here.",
                check=CHECK,
                false_alarm="convolutions run outside PyTorch's operators, where they are not "
                "recorded, or only with other inputs.",
            ),
        )
    if not notes.get("cudnn_benchmark_late"):
        return ()
    return (
        _information(
            title="benchmark mode came late: shapes that ran before keep their engines",
            evidence=(
                "convolutions ran during warm-up with torch.backends.cudnn.benchmark off",
                "torch.backends.cudnn.benchmark was on at the end",
            ),
            confidence="high",
            fix="Turn it on before the first call in the process, or let `steady tune` choose "
            "the engines and store them.",
            transforms=("cudnn_engines",),
            check=CHECK,
            false_alarm="all shapes that matter first ran after it was turned on.",
        ),
    )


def _mode_unknown() -> Abstention:
    return Abstention(
        NAME,
        "the trace does not record whether cuDNN's benchmark mode was on",
        "run `steady explain WORKLOAD`, which records it",
    )


def _information(**fields: Any) -> Finding:
    return Finding(id=NAME, source="compiler", information=True, **fields)


def _nothing_to_choose(trace: Trace, ledger: Ledger, rows: np.ndarray) -> str | None:
    """Why benchmark mode has no convolution to tune; None if it has one or this is unknown."""
    if ledger.kind != "gpu":
        return "the steps ran on the CPU"
    if len(rows) or len(by_name(trace, CALLS, _GRAPH)):  # a graph launch hides its operators
        return None
    return "cuDNN ran no convolution in the profiled steps"


def _first_suggestions(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[Finding, ...]:
    """Report fixed-shape convolutions that take much of the kernel time; inference only."""
    if ledger.kind != "gpu" or any(trace.name_of(row) == _BACKWARD for row in rows.tolist()):
        return ()
    shapes, spent = _shapes(trace, ledger, rows), _spent(trace, ledger, rows)
    steps = len(ledger.steps)
    if not shapes or spent[0] < LEAST_SHARE * spent[1]:
        return ()
    share = percent(spent[0] / spent[1])
    return (
        _information(
            title=f"convolutions use cuDNN's default engines: {share} of kernel time",
            evidence=(
                f"convolution kernels take {duration(spent[0] / steps)} a step",
                f"{many(len(shapes), 'convolution shape')}, the same in {many(steps, 'step')}",
                "torch.backends.cudnn.benchmark was off between calls",
            ),
            confidence="low",
            fix="Measure cuDNN's other engines with `steady conv WORKLOAD`. `steady tune` "
            "chooses among them and stores the choice in its plan.",
            transforms=("cudnn_engines", "cudnn_benchmark"),
            check="steady conv WORKLOAD",
            false_alarm="the default engine is already the fastest, which only measuring shows.",
        ),
    )


def _shapes(trace: Trace, ledger: Ledger, rows: np.ndarray) -> set[str]:
    """Input shapes of the convolutions, if equal in all of several steps; empty otherwise."""
    places = steps_of(ledger, trace.events.start_ns[rows])
    found: list[set[str]] = [set() for _ in ledger.steps]
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        dims = (trace.inputs_of(row) or {}).get("dims")
        if place >= 0 and dims is not None:
            found[place].add(str(dims))
    same = len(found) > 1 and all(shapes == found[0] for shapes in found)
    return found[0] if same else set()


def _spent(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[int, int]:
    """Time of the kernels that the given operators launched, and of all kernels, in ns."""
    seen, operators = launches_of(trace, ledger), operators_of(trace)
    mine = np.zeros(len(trace.events), dtype=bool)
    mine[rows] = True
    kernels = seen.of(Category.KERNEL)
    within = (seen.operator >= 0) & (operators.nearest(mine)[seen.operator] >= 0)
    return int(seen.length_ns[kernels & within].sum()), int(seen.length_ns[kernels].sum())
