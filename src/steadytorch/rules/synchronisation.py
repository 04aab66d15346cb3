"""The host waits for the GPU, and the GPU runs dry meanwhile."""

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
"""Of a step of `LONG_NS` and more: there it is a millisecond, the least that is worth a change."""
LONG_NS = 50_000_000
LEAST_SHARE_SHORT = 0.01
"""Of a shorter one. A fixed millisecond would be a third of a step of 3 ms; and of a step that runs
hundreds of times a second, one percent is measured with ease."""
LEAST_NS = 5_000
"""Per step: what launching a kernel takes, and what a profiler adds to a call or two."""


def rule(case: Case) -> Verdict:
    """Waiting that costs something: only where the GPU is idle, never the summed time of calls.

    Two parts. What the ledger lets a waiting call own: the GPU is idle and the host still waits.
    And what follows: the GPU ran dry during the wait and stays idle until the host, which could not
    run ahead, has launched again. Without the wait it would have launched earlier by the time it
    waited, so the shorter of the wait and the idle stretch counts. The
    ledger calls that part launching.

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
    drained = f"{many(len(waits) / count, 'time')} a step the GPU runs dry while the host waits"
    lines = [
        f"{duration(owned)} of a step the host waits although the GPU is idle",
        f"{drained}: launching earlier would save up to {duration(float(lost.sum()) / count)}",
        *(f"{name}: {duration(blame[name] / count)} a step" for name in causes),
    ]
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"waiting for the GPU costs {duration(cost)} ({percent(cost / step)}) "
            f"of a step, in {', '.join(causes)}",
            evidence=tuple(lines),
            slices=("idle_synchronisation", "idle_launch"),
            cost_ns=round(cost),
            recoverable_ns=(0, round(cost)),
            variance_share=variance_of(case, "idle_synchronisation"),
            confidence="high" if owned >= least * step else "medium",
            fix="Keep values on the GPU: no .item(), .cpu(), nonzero or printing of tensors within "
            "the step; read them every so many steps, together, or with non_blocking=True into "
            "pinned memory and an event.",
            check="torch.cuda.set_sync_debug_mode('warn') names the lines; then `steady explain` "
            "again",
            false_alarm="the wait is wanted: the result is needed at once, as the latency of a "
            "single request.",
        ),
    )


def _drained(trace: Trace, ledger: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """Waits during which the GPU ran dry, and the time lost by each; shape (waits,).

    Waits of whoever profiles, outside of every step's mark, are left out.
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
    # Of several waits at one idle stretch, as a copy and what waits for it, the longest counts.
    chosen = np.flatnonzero(ran_dry)[np.argsort(-lost[ran_dry], kind="stable")]
    chosen = chosen[np.unique(gap[chosen], return_index=True)[1]]
    return waits[chosen], lost[chosen]


def _in_steps(trace: Trace, ledger: Ledger, began: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Which calls lie within the marks of steps; without marks, within the trace's one step."""
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
