"""Find models that torch.compile splits into several graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steadytorch.findings.figures import many
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import no_trace
from steadytorch.findings.host_calls import steps_of, tally
from steadytorch.rules.recompilation import REGION
from steadytorch.traces.evidence import RANGES, by_name

NAME = "graph-break"
_SHOWN = 3


def rule(case: Case) -> Verdict:
    """Report graph breaks: code that ends one compiled graph, runs in Python and begins another.

    Dynamo's own break counts and reasons take precedence if they were captured. In a trace, code
    after a break runs as a compiled region *within* the region of the function that broke.
    Consecutive compiled regions are separately compiled functions, not graph breaks.

    Source: "Graph Breaks", torch.compile programming model, PyTorch documentation.
    """
    counted = (case.notes or {}).get("graph_breaks")
    reasons = _reasons(counted)
    if reasons:
        return (_finding(case, reasons, "high"),)
    if counted is not None:
        return ()
    if case.trace is None:
        return no_trace(NAME, "graph breaks")
    if len(_nested(case)):
        return (_finding(case, (), "medium"),)
    regions = by_name(case.trace, RANGES, REGION.pattern)
    older = by_name(case.trace, RANGES, r"CompiledFunction.*|.*OptimizedModule.*")
    if len(older) and not len(regions):
        why = "this PyTorch version does not name compiled regions in traces"
        return Abstention(NAME, why, "run with TORCH_LOGS=graph_breaks")
    return ()


def _reasons(counted: object) -> tuple[str, ...]:
    """Graph break reasons, one line each, most frequent first."""
    if isinstance(counted, Mapping):
        ordered = sorted(counted.items(), key=lambda item: -item[1])
        return tuple(f"{_line(reason)} ({many(count, 'time')})" for reason, count in ordered)
    if isinstance(counted, Sequence):
        return tuple(_line(reason) for reason in counted)
    return ()


def _line(reason: object) -> str:
    return (str(reason).strip().splitlines() or ["no reason given"])[0][:200]


def _nested(case: Case) -> np.ndarray:
    """Trace rows of compiled regions that run within another compiled region."""
    if case.trace is None:
        return np.empty(0, np.int64)
    trace = case.trace
    rows = by_name(trace, RANGES, REGION.pattern)
    events, inner = trace.events, np.zeros(len(rows), dtype=bool)
    for thread in np.unique(events.thread[rows]):
        mine = np.flatnonzero(events.thread[rows] == thread)
        reached = np.maximum.accumulate(events.end_ns[rows[mine]])
        inner[mine[1:]] = events.start_ns[rows[mine[1:]]] < reached[:-1]
    return rows[inner]


def _finding(case: Case, reasons: tuple[str, ...], confidence: str) -> Finding:
    lines = list(reasons[:_SHOWN])
    if len(reasons) > _SHOWN:
        lines.append(f"and {many(len(reasons) - _SHOWN, 'more reason')}")
    per_step = _regions_per_step(case)
    if per_step:
        lines.append(f"{many(per_step, 'compiled region')} a step")
    inner = _nested(case)
    if len(inner) and case.trace is not None:
        lines.append(f"nested regions: {tally(case.trace, inner)}")
    what = many(len(reasons), "distinct reason") if reasons else "compiled regions are nested"
    return Finding(
        id=NAME,
        source="compiler",
        title=f"torch.compile breaks the graph: {what}",
        evidence=tuple(lines),
        confidence=confidence,
        fix="Move untraceable code (printing, .item(), data-dependent branches, other libraries) "
        "out of the compiled function. fullgraph=True turns each break into an error that names "
        "its line.",
        check="TORCH_LOGS=graph_breaks, or torch.compile(model, fullgraph=True)",
        false_alarm="the break is in code that runs once per epoch, where it costs nothing. Its "
        "time is not measured here.",
    )


def _regions_per_step(case: Case) -> float:
    """Mean number of distinct compiled regions in a step."""
    if case.trace is None or case.ledger is None or not case.ledger.steps:
        return 0.0
    rows = by_name(case.trace, RANGES, REGION.pattern)
    places = steps_of(case.ledger, case.trace.events.start_ns[rows])
    pairs = np.stack([places, case.trace.events.name[rows]])[:, places >= 0]
    return np.unique(pairs, axis=1).shape[1] / len(case.ledger.steps)
