"""Helpers of GPU rules: get the GPU events of the steps, or abstain with a reason."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from steadytorch.findings.figures import amount, duration
from steadytorch.findings.finding import NO_GPU_EVENTS, Abstention, Case
from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.launches import Launches, launches_of
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.intervals import intersect, subtract, union
from steadytorch.traces.kernel_names import short

CHECK = "steady explain WORKLOAD"
"""Shows whether a fix worked: the finding and its time are gone."""
PROFILE = (
    "profile on the GPU: `steady explain WORKLOAD --device cuda`, or torch.profiler with "
    "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
)
SHAPES = "profile with record_shapes=True, as `steady explain WORKLOAD` does"


def no_trace(rule: str, what: str) -> Abstention:
    """Abstention of a rule that needs a trace and has none."""
    recipe = "run `steady explain WORKLOAD`, which profiles a few steps, or `steady explain TRACE`"
    return Abstention(rule, f"no steps were profiled: {what} cannot be seen", recipe)


def gpu_trace(case: Case, rule: str, what: str) -> tuple[Trace, Ledger] | Abstention:
    """Return the GPU trace and its time ledger, or the rule's abstention.

    Args:
        case: input of the rule.
        rule: name of the rule.
        what: events that the rule looks for, as a noun for the message.
    """
    if case.trace is None or case.ledger is None:
        return no_trace(rule, what)
    if case.ledger.kind != "gpu":
        why = f"{NO_GPU_EVENTS}: {what} cannot be seen"
        return Abstention(rule, why, PROFILE)
    return case.trace, case.ledger


def gpu_launches(case: Case, rule: str) -> Launches | Abstention:
    """Return the GPU events of the steps, or the rule's abstention.

    Args:
        case: input of the rule.
        rule: name of the rule, for the abstention.
    """
    found = gpu_trace(case, rule, "GPU work")
    return found if isinstance(found, Abstention) else launches_of(*found)


def exposed_ns(seen: Launches, chosen: np.ndarray) -> int:
    """Time in ns per step during which chosen events run and no kernel runs.

    As in the time ledger, any overlap with a kernel counts as kernel time.
    """
    kernels = seen.of(Category.KERNEL)
    mine = union(seen.start_ns[chosen], seen.end_ns[chosen])
    alone = subtract(mine, union(seen.start_ns[kernels], seen.end_ns[kernels]))
    steps = seen.ledger.steps
    start = np.array([step.start_ns for step in steps], dtype=np.int64)
    end = np.array([step.end_ns for step in steps], dtype=np.int64)
    return intersect(alone, union(start, end)).total_ns // seen.steps


def per_step(seen: Launches, chosen: np.ndarray) -> float:
    """Number of chosen events per step."""
    return int(np.count_nonzero(chosen)) / seen.steps


def spent_per_step(seen: Launches, chosen: np.ndarray) -> int:
    """Summed time of the chosen events in ns per step; concurrent events are added up."""
    return int(seen.length_ns[chosen].sum()) // seen.steps


def step_ns(ledger: Ledger) -> float:
    """Mean step length in ns, at least 1."""
    return max(1.0, sum(step.total_ns for step in ledger.steps) / max(1, len(ledger.steps)))


def busy_ns(ledger: Ledger) -> float:
    """Mean GPU busy time per step in ns, at least 1."""
    return max(1.0, sum(ledger.mean(name) for name in ledger.names if name.startswith("gpu_")))


def by_prefetch(case: Case) -> tuple[str, ...]:
    """Suggest the transform `prefetch` if steps ran on a GPU and the workload has a data loader.

    On a CPU, prefetching has no copy to the device to hide and no device work to overlap with.
    """
    on_gpu = case.ledger is not None and case.ledger.kind == "gpu"
    fed = case.workload is not None and case.workload.feed is not None
    return ("prefetch",) if on_gpu and fed else ()


class Named(NamedTuple):
    """Events of one name: their number and their time in ns, both per step."""

    name: str
    number: float
    time_ns: float

    def __str__(self) -> str:
        return f"{short(self.name)}: {amount(self.number)} a step, {duration(self.time_ns)}"


def longest(seen: Launches, chosen: np.ndarray, most: int = 3) -> list[Named]:
    """Names that take most time among the chosen events, longest first."""
    names = seen.trace.events.name[seen.rows[chosen]]
    kinds, place = np.unique(names, return_inverse=True)
    total = np.zeros(len(kinds), dtype=np.int64)
    np.add.at(total, place, seen.length_ns[chosen])
    count = np.bincount(place, minlength=len(kinds))
    return [
        Named(seen.trace.names[kinds[k]], int(count[k]) / seen.steps, int(total[k]) / seen.steps)
        for k in np.argsort(-total, kind="stable")[:most].tolist()
    ]
