"""Match kernels that recur in every step: find extra kernels and slower ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steadytorch.ledger.ledger import Ledger
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.steps import gpu_rows


@dataclass(frozen=True, eq=False)
class Repeats:
    """Kernels of each step, matched by name, grid and occurrence within the step.

    Attributes:
        count: kernels of each step, int64, shape (steps,).
        usual_ns: summed median time of each step's kernels, shape (steps,); steps differ in it if
            they run other kernels.
        slower_ns: time of each step with a kernel running, minus `usual_ns`, shape (steps,).
        step: step of each kernel, shape (kernels,).
        name: index into `Trace.names`, shape (kernels,).
        over_ns: time of each kernel beyond its median, float64, shape (kernels,).
        typical_ns: that median, shape (kernels,).
        everywhere: whether every step has the kernel, shape (kernels,).
    """

    count: np.ndarray
    usual_ns: np.ndarray
    slower_ns: np.ndarray
    step: np.ndarray
    name: np.ndarray
    over_ns: np.ndarray
    typical_ns: np.ndarray
    everywhere: np.ndarray

    def extra(self, place: int) -> tuple[int, float] | None:
        """Name and time of the kernels with the most time here, among those some steps lack."""
        return self._most(place, np.where(self.everywhere, 0.0, self.typical_ns))

    def slowed(self, place: int) -> tuple[int, float] | None:
        """Name of the kernels that exceed their usual time most in this step, and the excess."""
        return self._most(place, self.over_ns)

    def _most(self, place: int, time: np.ndarray) -> tuple[int, float] | None:
        mine = self.step == place
        names, which = np.unique(self.name[mine], return_inverse=True)
        if not len(names):
            return None
        sums = np.bincount(which, weights=time[mine])
        most = int(np.argmax(sums))
        return (int(names[most]), float(sums[most])) if sums[most] > 0 else None


def repeats(trace: Trace, ledger: Ledger) -> Repeats:
    """Match each kernel of a GPU step with the same kernel in the other steps."""
    events, count = trace.events, len(ledger.steps)
    rows = gpu_rows(trace, ledger.device)
    rows = rows[events.category[rows] == Category.KERNEL]
    starts = np.array([step.start_ns for step in ledger.steps], np.int64)
    ends = np.array([step.end_ns for step in ledger.steps], np.int64)
    step = np.searchsorted(starts, events.start_ns[rows], side="right") - 1
    inside = (step >= 0) & (events.start_ns[rows] < ends[np.maximum(step, 0)])
    rows, step = rows[inside], step[inside]
    length = (events.end_ns - events.start_ns)[rows].astype(np.float64)
    group = _same(events.name[rows], _grids(trace)[events.details[rows]])
    group = _same(group, _occurrence(group, step))
    typical, having = _medians(group, length)
    usual = np.bincount(step, weights=typical, minlength=count)
    kernel_ns = np.array([s.slices["gpu_kernel"] for s in ledger.steps], np.float64)
    return Repeats(
        count=np.bincount(step, minlength=count),
        usual_ns=usual,
        slower_ns=kernel_ns - usual,
        step=step,
        name=events.name[rows],
        over_ns=length - typical,
        typical_ns=typical,
        everywhere=having == count,
    )


def _grids(trace: Trace) -> np.ndarray:
    """Number of the launch grid of each `Trace.details` entry; last, -1 for kernels without."""
    numbers: dict[str, int] = {}
    found = [
        numbers.setdefault(str((details.get("grid"), details.get("block"))), len(numbers))
        for details in trace.details
    ]
    return np.array([*found, -1], np.int64)


def _same(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """For each element, the index of its pair (first, second) among the sorted distinct pairs."""
    low = second - second.min() if len(second) else second
    width = int(low.max()) + 1 if len(low) else 1
    return np.unique(first.astype(np.int64) * width + low, return_inverse=True)[1]


def _occurrence(group: np.ndarray, step: np.ndarray) -> np.ndarray:
    """For each kernel, the number of earlier kernels of the same group in the same step."""
    pair = _same(group, step)
    order = np.argsort(pair, kind="stable")
    ordered = pair[order]
    first = np.searchsorted(ordered, ordered, side="left")
    found = np.empty(len(pair), np.int64)
    found[order] = np.arange(len(pair)) - first
    return found


def _medians(group: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each value, the median and the size of its group."""
    order = np.lexsort((values, group))
    ordered, sorted_groups = values[order], group[order]
    first = np.searchsorted(sorted_groups, group, side="left")
    size = np.searchsorted(sorted_groups, group, side="right") - first
    low, high = ordered[first + (size - 1) // 2], ordered[first + size // 2]
    return (low + high) / 2, size
