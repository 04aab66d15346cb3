"""Find compilations by torch.compile in steady-state steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from steadytorch.findings.figures import duration, many, variance_of
from steadytorch.findings.finding import Case, Finding, Verdict
from steadytorch.findings.gpu_events import no_trace
from steadytorch.findings.host_calls import owned_ns, spent_ns, steady, steps_of, tally, unmarked
from steadytorch.findings.samples import Samples, samples_of
from steadytorch.measure.causes import RECOMPILATION
from steadytorch.traces.evidence import RANGES, by_name

NAME = "recompilation"
REGION = re.compile(r"Torch-Compiled Region: .*?(\d+)/(\d+).*")
"""PyTorch's name for a run of compiled code: the frame, then the number of its compilation."""

_COMPILES = r"(?!CachingAutotuner\.benchmark).*\(dynamo_timed\)"
"""Phases of compiling. Triton's timing of configurations belongs to `autotuning-in-loop`."""

_SLICE = {"gpu": "idle_compile", "cpu": "cpu_compile"}


@dataclass(frozen=True)
class _Seen:
    """Evidence of recompilation from one source: text lines, ns per step and certainty."""

    evidence: tuple[str, ...] = ()
    cost_ns: int = 0
    owned_ns: int = 0
    sure: bool = True


def rule(case: Case) -> Verdict:
    """Report any compilation after warm-up: a guard failed on a new shape or a changed value.

    The evidence is frames that Dynamo compiles while samples are taken, and Dynamo's annotations in
    the trace. Compiled regions absent from the first step name the recompiled code. Without a
    Dynamo annotation, a new region was compiled beforehand, as for buckets. Source: "Dealing with
    Recompilations" and "torch.compile Troubleshooting", PyTorch documentation.
    """
    samples = samples_of(case)
    counted = None if samples is None else samples.rise("compilations")
    if counted is None and case.trace is None:
        return no_trace(NAME, "compilations")
    timed = _counted(samples, counted) if samples and counted else _Seen()
    traced = _traced(case)
    if not timed.evidence and not traced.evidence:
        unclear = not traced.sure and counted is None
        return unmarked(NAME, "compilation") if unclear else ()
    varies = samples.variance_share(samples.caused_by(RECOMPILATION)) if samples else None
    name = _SLICE[case.ledger.kind] if case.ledger else "idle_compile"
    cost = timed.cost_ns or traced.cost_ns
    return (
        Finding(
            id=NAME,
            source="compiler",
            title=f"torch.compile recompiles in steady steps: {duration(cost)} a step"
            if cost
            else "torch.compile recompiles in steady steps",
            evidence=(*timed.evidence, *traced.evidence),
            # Compilations seen only in unprofiled samples are not in the profiled steps' ledger.
            slices=(name,) if traced.owned_ns else (),
            cost_ns=cost,
            recoverable_ns=(0, max(timed.cost_ns, traced.owned_ns)),
            variance_share=variance_of(case, name) if varies is None else varies,
            confidence="high" if timed.evidence or traced.sure else "low",
            fix="Mark varying dimensions with torch._dynamo.mark_dynamic, or compile with "
            "dynamic=True. Or pad inputs to a few sizes (buckets) and run each once beforehand.",
            check="TORCH_LOGS=recompiles, then `steady explain WORKLOAD` again",
            false_alarm="the measured steps met a new input shape, which is compiled only once.",
        ),
    )


def _counted(samples: Samples, frames: int) -> _Seen:
    places = samples.caused_by(RECOMPILATION)
    lines = [
        f"{many(frames, 'frame')} compiled in {many(samples.steps, 'step')} timed without "
        "the profiler"
    ]
    if len(places):
        longest = duration(float(samples.durations_ns[places].max()))
        lines.append(
            f"{many(len(places), 'outlier')} during a compilation: up to {longest} (median "
            f"{duration(samples.median_ns)})"
        )
    cost = round(samples.excess_ns(places))
    return _Seen(tuple(lines), cost, cost)


def _traced(case: Case) -> _Seen:
    if case.trace is None or case.ledger is None:
        return _Seen()
    trace, ledger = case.trace, case.ledger
    late = steady(trace, ledger, by_name(trace, RANGES, _COMPILES))
    if not len(late.rows):
        return _Seen(sure=not late.early or late.sure)
    spent = round(spent_ns(trace, late.rows) / late.steps)
    owned = round(owned_ns(trace, ledger, _SLICE[ledger.kind], late.rows) / late.steps)
    lines = [f"compiling takes {duration(spent)} a step: {tally(trace, late.rows)}"]
    if new := _new_regions(case):
        lines.append(f"regions absent from the first step: {', '.join(new[:5])}")
    return _Seen(tuple(lines), max(spent, owned), owned, late.sure)


def _new_regions(case: Case) -> list[str]:
    """Recompiled regions that run in later steps but not in the first step."""
    if case.trace is None or case.ledger is None or not case.ledger.marked:
        return []
    rows = by_name(case.trace, RANGES, REGION.pattern)
    places = steps_of(case.ledger, case.trace.events.start_ns[rows])
    names = case.trace.events.name[rows]
    later = set(names[places > 0].tolist()) - set(names[places == 0].tolist())
    found = {index: REGION.match(case.trace.names[index]) for index in later}
    seen = {m[1] for m in (REGION.match(n) for n in _names(case, names[places == 0])) if m}
    return sorted(m[0] for m in found.values() if m and m[1] in seen)


def _names(case: Case, indices: np.ndarray) -> list[str]:
    return [case.trace.names[index] for index in set(indices.tolist())] if case.trace else []
