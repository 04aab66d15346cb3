"""Find copies from or to pageable host memory, which the driver has to stage."""

from __future__ import annotations

import re

from steadytorch.findings.figures import duration, many, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import (
    CHECK,
    by_prefetch,
    exposed_ns,
    gpu_launches,
    longest,
    per_step,
    step_ns,
)
from steadytorch.traces.events import Category
from steadytorch.traces.evidence import STAGED_BYTES

NAME = "pageable-copy"
WORTH_NOTHING = 0.01
"""Share of the step below which a fix does not pay; the confidence is then medium."""

_ASYNCHRONOUS = re.compile(r"(cuda|cu|hip)Memcpy\w*Async")


def rule(case: Case) -> Verdict:
    """Report asynchronous copies that block because their memory is not pinned.

    Source: NVIDIA Nsight Systems User Guide, expert systems rule on asynchronous copies with
    pageable memory; CUDA C++ Best Practices Guide, "Pinned memory".
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    size = seen.trace.events.bytes[seen.rows]
    chosen = seen.of(Category.MEMCPY) & seen.named(lambda name: "pageable" in name.lower())
    chosen &= size > STAGED_BYTES  # smaller copies to the host come from `.item()`
    chosen &= seen.called(lambda name: bool(_ASYNCHRONOUS.match(name))) | (seen.call < 0)
    if not chosen.any():
        return ()
    cost = exposed_ns(seen, chosen)
    moved, spent = int(size[chosen].sum()), max(1, int(seen.length_ns[chosen].sum()))
    share = cost / step_ns(seen.ledger)
    events, calls = seen.trace.events, seen.call[chosen & (seen.call >= 0)]
    to_device = chosen & seen.named(lambda name: "HtoD" in name)
    held = int((events.end_ns[calls] - events.start_ns[calls]).sum()) // seen.steps
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"pageable copies: {many(per_step(seen, chosen), 'transfer')} a step "
            f"({moved / seen.steps / 1e6:.3g} MB) with unpinned host memory, not hidden by "
            f"kernels for {percent(share)} of the step",
            evidence=(
                *map(str, longest(seen, chosen)),
                f"{moved / spent:.3g} GB/s on average",
                f"the calls block the host for {duration(held)} of a step",
            ),
            slices=("gpu_memcpy",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=variance_of(case, "gpu_memcpy"),
            confidence="high" if share >= WORTH_NOTHING else "medium",
            fix="Pin host memory (DataLoader(pin_memory=True), tensor.pin_memory()) and copy "
            "with non_blocking=True, so that copies overlap with kernels.",
            transforms=by_prefetch(case) if to_device.any() else (),
            check=CHECK,
            false_alarm="the copy happens once, as when loading weights, or the host needs the "
            "result at once.",
        ),
    )
