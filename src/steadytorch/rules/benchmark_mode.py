"""What cuDNN's benchmark mode does for a workload whose shapes return; for information."""

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
"""Of the kernels' time that convolutions take: with less, other engines change a step little."""

_CONVOLUTION = r"aten::(cudnn_convolution\w*|convolution_backward)"
_BACKWARD = "aten::convolution_backward"
_GRAPH = r"(cuda|cu)GraphLaunch\w*"


def rule(case: Case) -> Verdict:
    """Whether the mode is on in vain, or off where convolutions of fixed shapes take the time.

    On, it chooses for convolutions that cuDNN runs, and only for shapes that have not run before:
    PyTorch keeps one engine per shape, whichever way it was chosen (`Conv_v8.cpp`). Off, PyTorch
    takes the first engine that cuDNN's heuristics suggest. Inputs of ever new shapes are the
    finding `autotuning-in-loop`.

    Source: "Enable cuDNN auto-tuner", PyTorch Performance Tuning Guide; `torch.backends.cudnn`,
    PyTorch documentation.
    """
    if case.trace is None or case.ledger is None:
        return no_trace(NAME, "convolutions")
    notes = case.notes or {}
    mode, rows = notes.get("cudnn_benchmark"), by_name(case.trace, (Category.CPU_OP,), _CONVOLUTION)
    if mode is None:
        return _untold() if len(rows) else ()
    if not mode:
        return _first_suggestions(case.trace, case.ledger, rows)
    if (why := _nothing_to_choose(case.trace, case.ledger, rows)) is not None:
        return (
            _told(
                title=f"benchmark mode is on and has nothing to choose: {why}",
                evidence=("torch.backends.cudnn.benchmark was on", why),
                confidence="high",
                fix="Leave torch.backends.cudnn.benchmark off: it changes nothing here.",
                check=CHECK,
                false_alarm="convolutions run outside of PyTorch's operators, which are not "
                "recorded; or other inputs bring some.",
            ),
        )
    if not notes.get("cudnn_benchmark_late"):
        return ()
    return (
        _told(
            title="benchmark mode came late: shapes that had run keep the engine chosen before",
            evidence=(
                "torch.backends.cudnn.benchmark was off while the workload warmed up, and "
                "convolutions ran",
                "it was on at the end",
            ),
            confidence="high",
            fix="Switch it on before the first call of the process, or have engines chosen "
            "beforehand and kept: `steady tune`.",
            transforms=("cudnn_engines",),
            check=CHECK,
            false_alarm="all shapes that matter came only after it was switched on.",
        ),
    )


def _untold() -> Abstention:
    return Abstention(
        NAME,
        "a trace does not say whether cuDNN's benchmark mode was on",
        "run `steady explain WORKLOAD`, which looks",
    )


def _told(**fields: Any) -> Finding:
    return Finding(id=NAME, source="compiler", information=True, **fields)


def _nothing_to_choose(trace: Trace, ledger: Ledger, rows: np.ndarray) -> str | None:
    """Why the mode has no convolution to choose for; None where it has, or nobody can see."""
    if ledger.kind != "gpu":
        return "the steps ran on the CPU"
    if len(rows) or len(by_name(trace, CALLS, _GRAPH)):  # a graph is one call, whatever it holds
        return None
    return "cuDNN ran no convolution in the profiled steps"


def _first_suggestions(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[Finding, ...]:
    """Convolutions of fixed shapes that take much of the GPU's work; of inference only."""
    if ledger.kind != "gpu" or any(trace.name_of(row) == _BACKWARD for row in rows.tolist()):
        return ()
    shapes, spent = _shapes(trace, ledger, rows), _spent(trace, ledger, rows)
    steps = len(ledger.steps)
    if not shapes or spent[0] < LEAST_SHARE * spent[1]:
        return ()
    share = percent(spent[0] / spent[1])
    return (
        _told(
            title=f"convolutions run by cuDNN's first suggestion: {share} of the kernels' time",
            evidence=(
                f"{duration(spent[0] / steps)} a step in kernels of convolutions",
                f"{many(len(shapes), 'shape')} of convolutions, the same in {many(steps, 'step')}",
                "torch.backends.cudnn.benchmark was off between calls",
            ),
            confidence="low",
            fix="`steady conv WORKLOAD` measures what cuDNN's other engines take; `steady tune` "
            "chooses among them, and its plan keeps the choice.",
            transforms=("cudnn_engines", "cudnn_benchmark"),
            check="steady conv WORKLOAD",
            false_alarm="the first suggestion is the fastest engine, which only measuring shows.",
        ),
    )


def _shapes(trace: Trace, ledger: Ledger, rows: np.ndarray) -> set[str]:
    """Shapes of the convolutions, if each of several steps has the same; else none."""
    places = steps_of(ledger, trace.events.start_ns[rows])
    found: list[set[str]] = [set() for _ in ledger.steps]
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        dims = (trace.inputs_of(row) or {}).get("dims")
        if place >= 0 and dims is not None:
            found[place].add(str(dims))
    same = len(found) > 1 and all(shapes == found[0] for shapes in found)
    return found[0] if same else set()


def _spent(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[int, int]:
    """Time of kernels that these operators launched, and of all kernels, in ns."""
    seen, operators = launches_of(trace, ledger), operators_of(trace)
    mine = np.zeros(len(trace.events), dtype=bool)
    mine[rows] = True
    kernels = seen.of(Category.KERNEL)
    within = (seen.operator >= 0) & (operators.nearest(mine)[seen.operator] >= 0)
    return int(seen.length_ns[kernels & within].sum()), int(seen.length_ns[kernels].sum())
