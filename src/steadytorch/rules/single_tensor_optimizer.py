"""Find optimizers that update one parameter after another."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from steadytorch.findings.figures import duration, percent
from steadytorch.findings.finding import Abstention, Case, Finding, Verdict
from steadytorch.findings.gpu_events import CHECK, PROFILE, step_ns
from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.launches import launches_of
from steadytorch.traces.events import ON_GPU, Category, Trace
from steadytorch.traces.evidence import RANGES, by_name

NAME = "single-tensor-optimizer"
FEWEST = 20
"""Minimum updates of single tensors a step. Smaller models gain little."""

_STEP = r"Optimizer\.step#.*"
_BACKWARD = r"autograd::engine.*|.*Backward\d*|.*AccumulateGrad"
_SEVERAL = re.compile(r"_foreach_|_fused_|multi_tensor|triton_")
_SINGLE = re.compile(r"^aten::(add|mul|addcmul|addcdiv|lerp|div|sub|sqrt|maximum)_?$")


class _Update(NamedTuple):
    """Work of optimizers over all steps.

    Attributes:
        rows: ranges of their steps.
        single: count of each operator on single tensors.
        several: count of each operator on many tensors at once.
    """

    rows: np.ndarray
    single: Counter[str]
    several: Counter[str]


def rule(case: Case) -> Verdict:
    """Report many small operators in an optimizer step where one for all tensors would do.

    Source: PyTorch, `torch.optim` (foreach and fused implementations, "how to use the for-loop,
    foreach and fused implementations"); PyTorch "Performance Tuning Guide".
    """
    if case.trace is None or case.ledger is None:
        return Abstention(NAME, "no steps were profiled", PROFILE)
    seen = _updates(case.trace, case.ledger)
    if not len(seen.rows):
        if not len(by_name(case.trace, (Category.CPU_OP,), _BACKWARD)):
            return ()
        return Abstention(NAME, "no optimizer step is marked in the trace", _MARK)
    steps = max(1, len(case.ledger.steps))
    count = seen.single.total() / steps
    if seen.several or count < FEWEST:
        return ()
    tensors = max(seen.single.values()) / steps
    # One pass would replace them all: at best tensors / count of the work remains.
    saved = 1 - tensors / count
    measure = _cost_on_gpu if case.ledger.kind == "gpu" else _cost_on_cpu
    launching, working = measure(case.trace, case.ledger, seen.rows)
    cost = launching + working
    names = ", ".join(f"{name} ({n / steps:.3g})" for name, n in seen.single.most_common(4))
    share = percent(cost / step_ns(case.ledger))
    return (
        Finding(
            id=NAME,
            source="kernel-launch overhead",
            title=f"single-tensor optimizer: {count:.0f} operators a step on single tensors, "
            f"{duration(cost)} ({share} of the step)",
            evidence=(
                f"{case.trace.name_of(int(seen.rows[0]))}: a step calls {names}",
                f"{duration(working)} of GPU work and {duration(launching)} of waiting for "
                "launches, a step"
                if case.ledger.kind == "gpu"
                else f"{duration(working)} a step",
            ),
            slices=("idle_launch", "gpu_kernel")
            if case.ledger.kind == "gpu"
            else ("cpu_elementwise", "cpu_operator", "cpu_python"),
            cost_ns=cost,
            recoverable_ns=(0, launching + round(saved * working)),
            confidence="high",
            fix="Create the optimizer with fused=True, or with foreach=True if it has no fused "
            "implementation.",
            check=CHECK,
            false_alarm="the optimizer is not elementwise, or memory is too small for the "
            "temporary tensors of foreach.",
        ),
    )


def _updates(trace: Trace, ledger: Ledger) -> _Update:
    events = trace.events
    rows = by_name(trace, RANGES, _STEP)
    if ledger.steps:
        # Without marks the only step begins at an operator; the range around it begins earlier.
        rows = rows[events.end_ns[rows] > ledger.steps[0].start_ns]
        rows = rows[events.start_ns[rows] < ledger.steps[-1].end_ns]
    single: Counter[str] = Counter()
    several: Counter[str] = Counter()
    for row in rows.tolist():
        for name, count in _names_within(trace, row).items():
            if _SEVERAL.search(name):
                several[name] += count
            elif _SINGLE.match(name):
                single[name] += count
    return _Update(rows, single, several)


def _names_within(trace: Trace, row: int) -> Counter[str]:
    """Operators of the same thread that begin within an event."""
    events = trace.events
    first, last = np.searchsorted(events.start_ns, [events.start_ns[row], events.end_ns[row]])
    inside = np.arange(first, last)
    chosen = (events.thread[inside] == events.thread[row]) & (
        events.category[inside] == Category.CPU_OP
    )
    indices, counts = np.unique(events.name[inside[chosen]], return_counts=True)
    return Counter({trace.names[i]: int(n) for i, n in zip(indices, counts, strict=True)})


def _cost_on_gpu(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[int, int]:
    """Idle time for launches, and kernel time, of launches in these ranges; in ns per step."""
    seen = launches_of(trace, ledger)
    events, owned = trace.events, ledger.owned
    mine = _begun_within(trace, events.start_ns[seen.call], events.thread[seen.call], rows)
    mine &= (seen.call >= 0) & seen.of(Category.KERNEL)
    # Time without a host owner is placed by its own start.
    known = (owned.row >= 0) & ~np.isin(events.category[owned.row], ON_GPU)
    began = np.where(known, events.start_ns[owned.row], owned.start_ns)
    thread = np.where(known, events.thread[owned.row], -1)
    pieces = _begun_within(trace, began, thread, rows)
    pieces &= owned.slice == ledger.names.index("idle_launch")
    length = owned.end_ns[pieces] - owned.start_ns[pieces]
    return int(length.sum()) // seen.steps, int(seen.length_ns[mine].sum()) // seen.steps


def _cost_on_cpu(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[int, int]:
    events = trace.events
    time = int((events.end_ns[rows] - events.start_ns[rows]).sum())
    return 0, time // max(1, len(ledger.steps))


def _begun_within(
    trace: Trace, began: np.ndarray, threads: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Mask of times within one of the ranges, on its thread or on none (-1)."""
    events = trace.events
    inside = np.zeros(len(began), dtype=bool)
    for thread in np.unique(events.thread[rows]):
        mine = rows[events.thread[rows] == thread]
        place = np.searchsorted(events.start_ns[mine], began, side="right") - 1
        open_still = (place >= 0) & (began < events.end_ns[mine[place.clip(min=0)]])
        inside |= np.isin(threads, (thread, -1)) & open_still
    return inside


_MARK = (
    "profile steps that call step() of a torch.optim optimizer, with ProfilerActivity.CPU: "
    "PyTorch marks them as Optimizer.step#NAME"
)
