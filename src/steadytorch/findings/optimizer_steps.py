"""Training in a trace: whether steps train, the operators of optimizers, and their time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from steadytorch.findings.figures import duration
from steadytorch.findings.finding import Abstention, Case, Verdict
from steadytorch.findings.gpu_events import PROFILE
from steadytorch.ledger.ledger import Ledger
from steadytorch.rates.launches import launches_of
from steadytorch.traces.events import ON_GPU, Category, Trace
from steadytorch.traces.evidence import RANGES, by_name

LEAST_SHARE = 0.01
"""Minimum share of the step that an optimizer must take."""
HAS_FUSED = re.compile(r"Optimizer\.step#(Adam|AdamW|SGD)\.step")
"""Matches the steps of optimizers with a fused implementation on every device."""
HAS_FOREACH = re.compile(
    HAS_FUSED.pattern
    + r"|Optimizer\.step#(ASGD|Ada(delta|factor|grad|max)|[NR]Adam|RMSprop|Rprop)\.step"
)
"""Matches the steps of PyTorch's optimizers with a foreach implementation."""

_STEP = r"Optimizer\.step#.*"
_BACKWARD = r"autograd::engine.*|.*Backward\d*|.*AccumulateGrad"
_SEVERAL = re.compile(r"_foreach_|_fused_|multi_tensor|triton_")
_SINGLE = re.compile(r"^aten::(add|mul|addcmul|addcdiv|lerp|div|sub|sqrt|maximum)_?$")
_MARK = (
    "profile steps that call step() of a torch.optim optimizer, with ProfilerActivity.CPU: "
    "PyTorch marks them as Optimizer.step#NAME"
)


@dataclass(frozen=True, eq=False)
class OptimizerWork:
    """Operators that optimizers ran, over all training steps.

    Attributes:
        trace: the trace.
        ledger: its ledger.
        rows: ranges of the optimizers' steps.
        single: count of each operator on single tensors.
        several: count of each operator on many tensors at once.
    """

    trace: Trace
    ledger: Ledger
    rows: np.ndarray
    single: Counter[str]
    several: Counter[str]

    @property
    def steps(self) -> int:
        """Number of training steps, at least 1."""
        return max(1, len(self.ledger.steps))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizers' steps, such as `Optimizer.step#AdamW.step`."""
        return tuple(sorted({self.trace.name_of(row) for row in self.rows.tolist()}))

    @property
    def slices(self) -> tuple[str, ...]:
        """Names of the time slices that contain the time of the optimizers."""
        if self.ledger.kind == "gpu":
            return "idle_launch", "gpu_kernel"
        return "cpu_elementwise", "cpu_operator", "cpu_python"

    def cost(self) -> tuple[int, int]:
        """Optimizer time spent waiting for launches, and spent working, in ns per step."""
        measure = _cost_on_gpu if self.ledger.kind == "gpu" else _cost_on_cpu
        return measure(self.trace, self.ledger, self.rows)

    def times(self, launching: int, working: int) -> str:
        """Format the two times of `cost` as a line of evidence."""
        if self.ledger.kind != "gpu":
            return f"{duration(launching + working)} a step"
        return (
            f"{duration(working)} of GPU work and {duration(launching)} of waiting for launches, "
            "a step"
        )


def is_training(case: Case) -> bool:
    """Whether steps train: as the workload says, else if a trace has optimizer steps or gradients.

    Args:
        case: input of the rule.
    """
    if case.workload is not None:
        return case.workload.is_training
    if case.trace is None:
        return False
    marks = by_name(case.trace, RANGES, _STEP)
    return bool(len(marks) or len(by_name(case.trace, (Category.CPU_OP,), _BACKWARD)))


def optimizer_work(case: Case, rule: str) -> OptimizerWork | Verdict:
    """Return the optimizers' work, an empty verdict if nothing trains, or an abstention.

    Args:
        case: input of the rule.
        rule: name of the rule, for the abstention.
    """
    if case.trace is None or case.ledger is None:
        return Abstention(rule, "no steps were profiled", PROFILE)
    seen = _work(case.trace, case.ledger)
    if len(seen.rows):
        return seen
    if not len(by_name(case.trace, (Category.CPU_OP,), _BACKWARD)):
        return ()
    return Abstention(rule, "no optimizer step is marked in the trace", _MARK)


def _work(trace: Trace, ledger: Ledger) -> OptimizerWork:
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
    return OptimizerWork(trace, ledger, rows, single, several)


def _names_within(trace: Trace, row: int) -> Counter[str]:
    """Count the operators, by name, that begin within an event on the same thread."""
    events = trace.events
    first, last = np.searchsorted(events.start_ns, [events.start_ns[row], events.end_ns[row]])
    inside = np.arange(first, last)
    chosen = (events.thread[inside] == events.thread[row]) & (
        events.category[inside] == Category.CPU_OP
    )
    indices, counts = np.unique(events.name[inside[chosen]], return_counts=True)
    return Counter({trace.names[i]: int(n) for i, n in zip(indices, counts, strict=True)})


def _cost_on_gpu(trace: Trace, ledger: Ledger, rows: np.ndarray) -> tuple[int, int]:
    """GPU time of optimizer steps in ns per step: idle during launches, and in kernels."""
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
    """Mask of times that lie within an event of the same thread; thread -1 matches any event."""
    events = trace.events
    inside = np.zeros(len(began), dtype=bool)
    for thread in np.unique(events.thread[rows]):
        mine = rows[events.thread[rows] == thread]
        place = np.searchsorted(events.start_ns[mine], began, side="right") - 1
        open_still = (place >= 0) & (began < events.end_ns[mine[place.clip(min=0)]])
        inside |= np.isin(threads, (thread, -1)) & open_still
    return inside
