"""The host launches faster than the GPU works, until the queue is full."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, busy_ns, gpu_launches, step_ns
from steadytorch.rates.launches import Launches
from steadytorch.traces.events import Category

NAME = "queue-full"
FULL = 1000
"""Launches outstanding in one stream. The limit is not documented: launching has been seen to wait
for room from 1,022 to 1,024 on (HolisticTraceAnalysis, `CUDA_MAX_LAUNCH_QUEUE_PER_STREAM`)."""


def rule(case: Case) -> Verdict:
    """How many launches wait for the GPU at the most; information, nothing to mend.

    Source: HolisticTraceAnalysis, "Augmented counters" (queue length per stream); CUPTI Activity
    API, overhead kind "command buffer full", which the driver reports itself.
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    if len(seen.rows) and (seen.call < 0).all():
        why = "the calls that launched the GPU's work were not recorded"
        return Abstention(NAME, why, "profile with ProfilerActivity.CPU as well")
    most, at = _most_outstanding(seen)
    events = seen.trace.events
    full = [i for i, name in enumerate(seen.trace.names) if name.startswith("Command Buffer Full")]
    told = np.isin(events.name, full) & (events.category == Category.OVERHEAD)
    if most < FULL and not told.any():
        return ()
    share = busy_ns(seen.ledger) / step_ns(seen.ledger)
    waited = int((events.end_ns[told] - events.start_ns[told]).sum())
    lines = [
        f"most outstanding {duration(at - seen.ledger.steps[0].start_ns)} after the first step "
        "began",
        f"the GPU works {percent(share)} of the step",
    ]
    if told.any():
        lines.append(
            f"the driver waited for room {many(int(told.sum()), 'time')}, "
            f"{duration(waited)} together"
        )
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"the launch queue fills ({most:,} outstanding): the host is ahead, "
            + ("the step is GPU-bound" if share >= 0.8 else "the GPU is what it waits for then"),
            evidence=tuple(lines),
            confidence="high" if most >= FULL else "medium",
            fix="Nothing to mend on the host: time in launching calls is waiting for room. Make "
            "the GPU's work shorter.",
            check=CHECK,
            false_alarm="a burst of small launches behind one long kernel, such as an optimizer "
            "step.",
            information=True,
        ),
    )


def _most_outstanding(seen: Launches) -> tuple[int, int]:
    """Calls made whose first event has not begun, at the most in one stream; and when."""
    events = seen.trace.events
    known = np.flatnonzero(seen.call >= 0)
    # A call that launches a graph is one, however many events it brings.
    known = known[np.unique(seen.call[known], return_index=True)[1]]
    most, at = 0, 0
    for stream in np.unique(events.stream[seen.rows[known]]):
        mine = known[events.stream[seen.rows[known]] == stream]
        times = np.concatenate([events.start_ns[seen.call[mine]], seen.start_ns[mine]])
        change = np.repeat([1, -1], len(mine))
        # What begins at the same moment as another is launched makes room first.
        order = np.lexsort((change, times))
        depth = np.cumsum(change[order])
        if depth.max() > most:
            most, at = int(depth.max()), int(times[order][depth.argmax()])
    return most, at
