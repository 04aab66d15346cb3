"""Find host waits that leave the GPU without work."""

from __future__ import annotations

from collections import Counter

import numpy as np

from steadytorch.findings.figures import duration, many, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import gpu_trace, step_ns
from steadytorch.findings.host_calls import callers, steps_of
from steadytorch.ledger.ledger import Ledger
from steadytorch.traces.events import Trace
from steadytorch.traces.evidence import Evidence, evidence
from steadytorch.traces.intervals import union
from steadytorch.traces.steps import CALLS, gpu_rows, step_marks

NAME = "synchronisation"
LEAST_SHARE = 0.02
"""Minimum cost as a share of the step, for steps of at least `LONG_NS`: a millisecond at 50 ms,
the least that is worth a change."""
LONG_NS = 50_000_000
LEAST_SHARE_SHORT = 0.01
"""Minimum share of a shorter step. A fixed millisecond would be a third of a 3 ms step. One
percent is easy to measure at hundreds of steps a second."""
LEAST_NS = 5_000
"""Minimum cost per step: about one kernel launch, or the profiler's cost of a call or two."""


def rule(case: Case) -> Verdict:
    """Report host waits by the GPU idle time they cause, not by the duration of the calls.

    The cost is the larger of two estimates. The first estimate is the GPU idle time during host
    waits, which the ledger attributes to the waiting call. The second estimate takes idle stretches
    that begin during a wait and end at the next launch. The ledger counts idle time after a wait as
    launching. Without a wait, the host would launch earlier by at most its duration, so the shorter
    of wait and idle stretch counts.

    Source: "Avoid unnecessary CPU-GPU synchronization", PyTorch Performance Tuning Guide;
    "Asynchronous Concurrent Execution", CUDA Programming Guide.
    """
    seen = gpu_trace(case, NAME, "waiting for the GPU")
    if isinstance(seen, Abstention):
        return seen
    trace, ledger = seen
    step = step_ns(ledger)
    count = max(1, len(ledger.steps))
    owned = ledger.mean("idle_synchronisation")
    waits, lost = _drained(trace, ledger)
    cost = max(owned, float(lost.sum()) / count)
    least = LEAST_SHARE if step >= LONG_NS else LEAST_SHARE_SHORT
    if cost < max(LEAST_NS, least * step):
        return ()
    owners, lengths = ledger.idle_of("idle_synchronisation")
    known = owners >= 0
    if owned >= lost.sum() / count:
        blame = _by_caller(trace, owners[known], lengths[known])
    else:
        blame = _by_caller(trace, waits, lost)
    causes = [name for name, _ in blame.most_common(3)]
    drained = f"the GPU runs dry during a wait {many(len(waits) / count, 'time')} a step"
    lines = [
        f"the host waits on an idle GPU for {duration(owned)} of a step",
        f"{drained}: launching earlier would save up to {duration(float(lost.sum()) / count)}",
        *(f"{name}: {duration(blame[name] / count)} a step" for name in causes),
    ]
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"waiting for the GPU costs {duration(cost)} ({percent(cost / step)}) of a "
            f"step, in {', '.join(causes)}",
            evidence=tuple(lines),
            slices=("idle_synchronisation", "idle_launch"),
            cost_ns=round(cost),
            recoverable_ns=(0, round(cost)),
            variance_share=variance_of(case, "idle_synchronisation"),
            confidence="high" if owned >= least * step else "medium",
            fix="Keep values on the GPU: avoid .item(), .cpu(), nonzero and printing tensors in "
            "the step. Read values together every few steps, or copy them to pinned memory with "
            "non_blocking=True and an event.",
            check="torch.cuda.set_sync_debug_mode('warn') names the lines; then `steady explain` "
            "again",
            false_alarm="the result is needed at once, as for the latency of a single request.",
        ),
    )


def _drained(trace: Trace, ledger: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """Waits during which the GPU ran out of work, and the time lost in ns; shape (waits,).

    Waits outside all step marks, such as the profiler's own, are excluded.
    """
    events = trace.events
    waits = np.flatnonzero(
        (evidence(trace) == Evidence.SYNCHRONISATION) & np.isin(events.category, CALLS)
    )
    rows = gpu_rows(trace, ledger.device)
    busy = union(events.start_ns[rows], events.end_ns[rows])
    dry, until = busy.end[:-1], busy.start[1:]
    began, ended = events.start_ns[waits], events.end_ns[waits]
    if not len(dry):
        return waits[:0], waits[:0]
    gap = np.searchsorted(dry, ended, side="right") - 1
    place = gap.clip(min=0)
    ran_dry = (gap >= 0) & (dry[place] >= began) & (until[place] >= ended)
    ran_dry &= _in_steps(trace, ledger, began, ended)
    lost = np.minimum(until[place] - dry[place], ended - began)
    # Of several waits in one idle stretch (a copy and its synchronisation), the longest counts.
    chosen = np.flatnonzero(ran_dry)[np.argsort(-lost[ran_dry], kind="stable")]
    chosen = chosen[np.unique(gap[chosen], return_index=True)[1]]
    return waits[chosen], lost[chosen]


def _in_steps(trace: Trace, ledger: Ledger, began: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Mask of the calls within step marks; without marks, within the trace's single step."""
    if not ledger.marked:
        return steps_of(ledger, began) >= 0
    marks = step_marks(trace)
    starts, ends = trace.events.start_ns[marks], trace.events.end_ns[marks]
    place = np.searchsorted(starts, began, side="right") - 1
    return (place >= 0) & (ended <= ends[place.clip(min=0)])


def _by_caller(trace: Trace, rows: np.ndarray, lengths: np.ndarray) -> Counter[str]:
    blame: Counter[str] = Counter()
    for name, length in zip(callers(trace, rows), lengths.tolist(), strict=True):
        blame[name] += length
    return blame
