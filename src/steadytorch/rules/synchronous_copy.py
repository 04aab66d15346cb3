"""Find copy calls that block the host until the data has arrived."""

from __future__ import annotations

import re

from steadytorch.findings.figures import duration, many, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import (
    CHECK,
    exposed_ns,
    gpu_launches,
    longest,
    per_step,
    step_ns,
)
from steadytorch.findings.host_calls import owned_ns
from steadytorch.traces.events import Category
from steadytorch.traces.evidence import STAGED_BYTES

NAME = "synchronous-copy"

_SYNCHRONOUS = re.compile(r"(cuda|cu|hip)Memcpy(?!\w*(Async|Batch))\w*")


def rule(case: Case) -> Verdict:
    """Report copies by `cudaMemcpy` and similar calls without `Async` in their names.

    Excluded are copies within the device, which do not block the host, and small copies to the
    device, which are staged. Source: NVIDIA Nsight Systems User Guide, expert systems rule on
    synchronous copies; CUDA Driver API, "API synchronization behavior".
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    size = seen.trace.events.bytes[seen.rows]
    small = seen.named(lambda name: "HtoD" in name) & (size <= STAGED_BYTES)
    chosen = seen.of(Category.MEMCPY) & ~small & ~seen.named(lambda name: "DtoD" in name)
    chosen &= seen.called(lambda name: bool(_SYNCHRONOUS.match(name)))
    if not chosen.any():
        return ()
    waited = owned_ns(seen.trace, seen.ledger, "idle_synchronisation", seen.call[chosen])
    copied = exposed_ns(seen, chosen)
    cost = copied + waited // seen.steps
    return (
        Finding(
            id=NAME,
            source="synchronisation",
            title=f"synchronous copies: {many(per_step(seen, chosen), 'transfer')} a step cost "
            f"{duration(cost)} ({percent(cost / step_ns(seen.ledger))} of the step)",
            evidence=(
                *map(str, longest(seen, chosen)),
                f"no kernel hides the copies for {duration(copied)} a step; the GPU then waits "
                f"{duration(waited // seen.steps)} for the host",
            ),
            slices=("gpu_memcpy", "idle_synchronisation"),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high",
            fix="Copy asynchronously on a separate stream: pinned memory and tensor.to(device, "
            "non_blocking=True), or cudaMemcpyAsync in extensions.",
            check=CHECK,
            false_alarm="the host needs the result at once, outside the steady loop.",
        ),
    )
