"""Copies by calls that return only when the data has arrived."""

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
    """`cudaMemcpy` and its kin without `Async`.

    Copies within the device do not hold the host, and small ones to it are staged; both are left
    out, as in the NVIDIA Nsight Systems User Guide (expert systems rule on synchronous copies);
    see also the CUDA Driver API, "API synchronization behavior".
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
            title=f"synchronous copies: {many(per_step(seen, chosen), 'transfer')} a step, which "
            f"cost {duration(cost)} ({percent(cost / step_ns(seen.ledger))} of it)",
            evidence=(
                *map(str, longest(seen, chosen)),
                f"{duration(copied)} a step in which only the copy runs, "
                f"{duration(waited // seen.steps)} in which the GPU waits for the host after it",
            ),
            slices=("gpu_memcpy", "idle_synchronisation"),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            confidence="high",
            fix="Copy asynchronously on a stream of its own: pinned memory and "
            "tensor.to(device, non_blocking=True), or cudaMemcpyAsync in extensions.",
            check=CHECK,
            false_alarm="a copy whose result the host needs at once, outside of the steady loop.",
        ),
    )
