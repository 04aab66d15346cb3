"""Split each step into slices of time that do not overlap and add up to the step.

GPU time is split by class of event. Where classes of GPU events overlap, the first in
`ON_GPU_FIRST` counts, so copies and communication show only where no kernel hides them. Each idle
nanosecond of the GPU has one owner: see `idle_owners`. Without GPU events, steps are split by
operator: see `operator_slices`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steadytorch.ledger.idle_owners import Owned, own_idle
from steadytorch.ledger.operator_slices import CPU_SLICES, own_host, recorded_parts
from steadytorch.results.explain import GpuTotals
from steadytorch.traces.events import Category, Trace
from steadytorch.traces.intervals import NEVER, Spans, covered_ns, joined, subtract, union
from steadytorch.traces.kernel_names import communicates
from steadytorch.traces.quality import LAST_STEP, quality
from steadytorch.traces.steps import Step, busiest_device, find_steps, gpu_rows

ON_GPU_FIRST = ("gpu_kernel", "gpu_memcpy", "gpu_memset", "gpu_communication")
"""Classes of GPU events; the first counts where they overlap."""
SLICES = (
    "gpu_kernel",
    "gpu_communication",
    "gpu_memcpy",
    "gpu_memset",
    "idle_data_wait",
    "idle_synchronisation",
    "idle_compile",
    "idle_allocation",
    "idle_gc",
    "idle_launch",
    "idle_cross_stream",
    "idle_profiler",
    "unknown",
)
"""Slices of a step in a GPU trace.

- `gpu_kernel`, `gpu_memcpy`, `gpu_memset`, `gpu_communication`: the GPU worked.
- `idle_data_wait`: the host was in the input pipeline.
- `idle_synchronisation`: the host waited for the GPU, which had already finished.
- `idle_compile`: the host compiled, autotuned or loaded a kernel.
- `idle_allocation`: the host requested memory from the driver or returned it.
- `idle_gc`: Python collected garbage.
- `idle_launch`: the host prepared the next launch, or the launch was on its way.
- `idle_cross_stream`: the next event waited for another stream or GPU.
- `idle_profiler`: the profiler saved its records.
- `unknown`: no record gives a reason; the owner is the host's current event."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """Where the time of each step went.

    Attributes:
        steps: steps in order; the `slices` of each add up to `total_ns`, to the nanosecond.
        owned: owners of every idle nanosecond; in a "cpu" ledger, of every nanosecond.
        gpu: totals of the GPU; None for a "cpu" ledger.
        kind: "gpu" or "cpu".
        marks: rows of the step marks; empty if the whole trace is one step.
        names: the slices, `SLICES` or `CPU_SLICES`; `Owned.slice` indexes them.
        device: index of the GPU; -1 for a "cpu" ledger.
        notes: caveats for the reader.
    """

    steps: tuple[Step, ...]
    owned: Owned
    gpu: GpuTotals | None
    kind: str
    marks: np.ndarray
    names: tuple[str, ...]
    device: int
    notes: tuple[str, ...] = ()

    @property
    def marked(self) -> bool:
        """Whether the trace marks its steps."""
        return bool(len(self.marks))

    @property
    def total_ns(self) -> int:
        """Time of all steps."""
        return sum(step.total_ns for step in self.steps)

    def total(self, *names: str) -> int:
        """Total time of the named slices over all steps, in ns."""
        return sum(step.slices[name] for step in self.steps for name in names)

    def mean(self, *names: str) -> float:
        """Mean time of the named slices per step, in ns."""
        return self.total(*names) / len(self.steps) if self.steps else 0.0

    def share(self, *names: str) -> float:
        """Share of the named slices in the time of all steps, from 0 to 1."""
        return self.total(*names) / self.total_ns if self.total_ns else 0.0

    def idle_of(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """The events that own the time of the named slices.

        Returns:
            Rows (-1 for unknown) and the ns of each over all steps, int64, largest first.
        """
        kinds = [self.names.index(name) for name in names]
        mine = np.isin(self.owned.slice, kinds)
        rows, place = np.unique(self.owned.row[mine], return_inverse=True)
        time = np.zeros(len(rows), np.int64)
        np.add.at(time, place, (self.owned.end_ns - self.owned.start_ns)[mine])
        order = np.argsort(-time, kind="stable")
        return rows[order], time[order]


def build_ledger(trace: Trace, device: int | None = None) -> Ledger:
    """Split every step of a trace into slices of time; a truncated last step is left out.

    Args:
        trace: the trace.
        device: index of the GPU; None for the busiest. Ignored without GPU events.
    """
    chosen = busiest_device(trace) if device is None or not len(trace.on_gpu) else device
    steps, marks = find_steps(trace, chosen)
    if LAST_STEP in quality(trace).distrusted:
        steps, marks = steps[:-1], marks[:-1]
    time = Spans(
        np.array([step.start_ns for step in steps], np.int64),
        np.array([step.end_ns for step in steps], np.int64),
    )
    time = time.pick(time.end > time.start)
    names, classes, totals = CPU_SLICES, {}, None
    if chosen is None:
        owned = own_host(trace, time, marks)
    else:
        rows = gpu_rows(trace, chosen)
        names, classes, totals = SLICES, gpu_classes(trace, rows), gpu_totals(trace, rows)
        owned = own_idle(trace, subtract(time, joined(*classes.values())), rows, marks, names)
    return Ledger(
        steps=_filled(steps, names, classes, owned),
        owned=owned,
        gpu=totals,
        kind="cpu" if chosen is None else "gpu",
        marks=marks,
        names=names,
        device=-1 if chosen is None else chosen,
        notes=_notes(trace, marks, chosen),
    )


def gpu_totals(trace: Trace, rows: np.ndarray) -> GpuTotals:
    """Busy, idle and total time of one GPU, from the rows of its events."""
    events = trace.events
    if not len(rows):
        return GpuTotals(0, 0, 0)
    busy = union(events.start_ns[rows], events.end_ns[rows])
    total = int(events.end_ns[rows].max() - events.start_ns[rows].min())
    return GpuTotals(busy.total_ns, total - busy.total_ns, total)


def gpu_classes(trace: Trace, rows: np.ndarray) -> dict[str, Spans]:
    """Time of each class of GPU events, less any overlap with earlier classes in `ON_GPU_FIRST`."""
    category, name = trace.events.category[rows], trace.events.name[rows]
    used = np.unique(name[category == Category.KERNEL])
    exchanging = np.isin(name, [index for index in used if communicates(trace.names[index])])
    kernel = category == Category.KERNEL
    of = {
        "gpu_kernel": kernel & ~exchanging,
        "gpu_memcpy": category == Category.MEMCPY,
        "gpu_memset": category == Category.MEMSET,
        "gpu_communication": kernel & exchanging,
    }
    return exclusive({name: rows[of[name]] for name in ON_GPU_FIRST}, trace)


def exclusive(classes: dict[str, np.ndarray], trace: Trace) -> dict[str, Spans]:
    """Time in which events of each class ran, without the time of earlier classes.

    Args:
        classes: rows by class, sorted; in order of priority.
        trace: the trace.
    """
    found: dict[str, Spans] = {}
    taken = NEVER
    for name, rows in classes.items():
        spans = union(trace.events.start_ns[rows], trace.events.end_ns[rows])
        found[name] = subtract(spans, taken)
        taken = joined(taken, spans)
    return found


def _filled(
    steps: tuple[Step, ...], names: tuple[str, ...], classes: dict[str, Spans], owned: Owned
) -> tuple[Step, ...]:
    """Copies of the steps with the time of each slice filled in."""
    start = np.array([step.start_ns for step in steps], np.int64)
    end = np.array([step.end_ns for step in steps], np.int64)
    columns = {name: covered_ns(spans, start, end) for name, spans in classes.items()}
    for place, name in enumerate(names):
        if name not in columns:
            mine = owned.slice == place
            spans = Spans(owned.start_ns[mine], owned.end_ns[mine])
            columns[name] = covered_ns(spans, start, end)
    return tuple(
        replace(step, slices={name: int(columns[name][place]) for name in names})
        for place, step in enumerate(steps)
    )


def _notes(trace: Trace, marks: np.ndarray, device: int | None) -> tuple[str, ...]:
    notes = []
    if not len(marks):
        notes.append(
            "no step marks: the whole trace counts as one step; call the profiler's step() after "
            "each step"
        )
    devices = np.unique(trace.events.device[trace.on_gpu]).tolist()
    if len(devices) > 1:
        listed = ", ".join(map(str, devices))
        notes.append(f"the trace has several GPUs ({listed}): the ledger is for GPU {device}")
    if len(recorded_parts(trace)):
        notes.append("recorded by a watch: host time by the parts of a step, without operators")
    elif device is None:
        notes.append("no GPU events: the ledger is for the operators on the CPU")
    return tuple(notes)
