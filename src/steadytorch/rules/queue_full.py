"""Find a full launch queue: the host launches faster than the GPU works."""

from __future__ import annotations

import numpy as np

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, busy_ns, gpu_launches, step_ns
from steadytorch.rates.launches import Launches
from steadytorch.traces.events import Category

NAME = "queue-full"
FULL = 1000
"""Outstanding launches in one stream that count as full. The limit is undocumented; launches
were seen to wait for room from 1,022 to 1,024 on (HolisticTraceAnalysis,
`CUDA_MAX_LAUNCH_QUEUE_PER_STREAM`)."""


def rule(case: Case) -> Verdict:
    """Report the peak number of launches queued for the GPU if the queue fills; information only.

    Source: HolisticTraceAnalysis, "Augmented counters" (queue length per stream); CUPTI Activity
    API, overhead kind "command buffer full", which the driver reports itself.
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    if len(seen.rows) and (seen.call < 0).all():
        why = "launch calls were not recorded"
        return Abstention(NAME, why, "profile with ProfilerActivity.CPU as well")
    most, at = _most_outstanding(seen)
    events = seen.trace.events
    full = [i for i, name in enumerate(seen.trace.names) if name.startswith("Command Buffer Full")]
    reported = np.isin(events.name, full) & (events.category == Category.OVERHEAD)
    if most < FULL and not reported.any():
        return ()
    share = busy_ns(seen.ledger) / step_ns(seen.ledger)
    waited = int((events.end_ns[reported] - events.start_ns[reported]).sum())
    lines = [
        f"peak {duration(at - seen.ledger.steps[0].start_ns)} after the first step began",
        f"the GPU is busy for {percent(share)} of the step",
    ]
    if reported.any():
        lines.append(
            f"launches waited for room {many(int(reported.sum()), 'time')}, {duration(waited)} "
            "in total"
        )
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"the launch queue fills ({most:,} outstanding): the host is ahead "
            + ("and the step is GPU-bound" if share >= 0.8 else "and at times waits for the GPU"),
            evidence=tuple(lines),
            confidence="high" if most >= FULL else "medium",
            fix="Nothing to fix on the host: its launch calls wait for room in the queue. "
            "Shorten the GPU's work.",
            check=CHECK,
            false_alarm="a burst of small launches, such as an optimizer step, queues behind one "
            "long kernel.",
            information=True,
        ),
    )


def _most_outstanding(seen: Launches) -> tuple[int, int]:
    """Peak number of launches in one stream that wait for the GPU, and the time of the peak."""
    events = seen.trace.events
    known = np.flatnonzero(seen.call >= 0)
    # A graph launch is one call, however many events it brings.
    known = known[np.unique(seen.call[known], return_index=True)[1]]
    most, at = 0, 0
    for stream in np.unique(events.stream[seen.rows[known]]):
        mine = known[events.stream[seen.rows[known]] == stream]
        times = np.concatenate([events.start_ns[seen.call[mine]], seen.start_ns[mine]])
        change = np.repeat([1, -1], len(mine))
        # At equal times, an event that begins makes room before the next launch.
        order = np.lexsort((change, times))
        depth = np.cumsum(change[order])
        if depth.max() > most:
            most, at = int(depth.max()), int(times[order][depth.argmax()])
    return most, at
