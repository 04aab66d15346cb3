"""Find steps with many copies, or with long copies that do not overlap with kernels."""

from __future__ import annotations

import re

import numpy as np

from steadytorch.findings.figures import amount, duration, many, percent, variance_of
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, exposed_ns, gpu_launches, per_step, step_ns
from steadytorch.quantities import size
from steadytorch.rates.launches import Launches
from steadytorch.traces.events import Category

NAME = "copies"
LEAST_SHARE = 0.05
"""Minimum share of the step spent copying: the threshold of Kineto's TensorBoard plug-in
(`tb_plugin`) for data loading, which ends in copies."""
MOST = 10
"""Copies a step from which joining pays: each costs some 10 us to launch, whatever its size
(CUDA C++ Best Practices Guide, "Data transfer between host and device")."""

_BETWEEN = (
    "Join small copies and keep data on the device between steps. Overlap the rest with kernels: "
    "pinned memory, non_blocking=True, a separate stream."
)
_WITHIN = (
    "Write results in place or to their destination (out=) in place of clone, cat and contiguous. "
    "Fuse the rest with torch.compile."
)
_KIND = re.compile(r"[HDP]to[HDP]|PtoP", re.IGNORECASE)


def rule(case: Case) -> Verdict:
    """Report copies to, from or within devices if they are many or do not overlap with kernels.

    Source: CUDA C++ Best Practices Guide, "Data transfer between host and device" (batch small
    transfers) and "Asynchronous and overlapping transfers with computation".
    """
    seen = gpu_launches(case, NAME)
    if isinstance(seen, Abstention):
        return seen
    chosen = seen.of(Category.MEMCPY)
    cost, count = exposed_ns(seen, chosen), per_step(seen, chosen)
    share = cost / step_ns(seen.ledger)
    if share <= LEAST_SHARE and count <= MOST:
        return ()
    within = seen.named(lambda name: "DtoD" in name)
    return (
        Finding(
            id=NAME,
            source="memory bandwidth",
            title=f"copies: {many(count, 'transfer')} {_period(seen)}, not hidden by kernels for "
            f"{percent(share)} of the {'step' if seen.ledger.marked else 'trace'}",
            evidence=_evidence(seen, chosen),
            slices=("gpu_memcpy",),
            cost_ns=cost,
            recoverable_ns=(0, cost),
            variance_share=variance_of(case, "gpu_memcpy"),
            confidence="high" if share > LEAST_SHARE else "low",
            fix=_WITHIN if within[chosen].all() else _BETWEEN,
            check=CHECK,
            false_alarm="an operator needs these copies within the device, and they take little "
            "time.",
        ),
    )


def _period(seen: Launches) -> str:
    """What a count covers: without step marks, the whole trace is one step."""
    return "a step" if seen.ledger.marked else "in the trace"


def _evidence(seen: Launches, chosen: np.ndarray) -> tuple[str, ...]:
    """One line of evidence per copy direction, longest total time first."""
    kinds: dict[str, np.ndarray] = {}
    for index in np.unique(seen.trace.events.name[seen.rows[chosen]]):
        found = _KIND.search(seen.trace.names[index])
        mine = chosen & (seen.trace.events.name[seen.rows] == index)
        kind = found[0] if found else "other"
        kinds[kind] = kinds.get(kind, False) | mine
    moved = seen.trace.events.bytes[seen.rows].clip(min=0)
    order = sorted(kinds, key=lambda kind: -int(seen.length_ns[kinds[kind]].sum()))
    return tuple(
        f"{kind}: {amount(per_step(seen, kinds[kind]))} {_period(seen)}, "
        f"{size(int(moved[kinds[kind]].sum()) / seen.steps)}, "
        f"{duration(exposed_ns(seen, kinds[kind]))} not hidden by kernels"
        for kind in order
    )
