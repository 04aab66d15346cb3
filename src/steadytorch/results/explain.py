"""The result of `steady explain`: where a workload's step time goes, and why it varies."""

from __future__ import annotations

from typing import Any

import msgspec

from steadytorch.results.machine import DeviceFacts
from steadytorch.results.measure import Measurement
from steadytorch.results.shown import Shown


class StepTime(msgspec.Struct, frozen=True):
    """The times of one profiled step.

    Attributes:
        index: its number in the trace.
        total_ns: its duration.
        slices_ns: slice to its time; the slices add up to the total.
    """

    index: int
    total_ns: int
    slices_ns: dict[str, int]


class GpuTotals(msgspec.Struct, frozen=True):
    """Busy and idle time of one GPU over the whole trace, including time between marked steps.

    Attributes:
        busy_ns: time with an event running.
        idle_ns: the rest.
        total_ns: from the start of the first event to the end of the last.
    """

    busy_ns: int
    idle_ns: int
    total_ns: int


class KernelSplit(msgspec.Struct, frozen=True):
    """The kernels' share of the step-time variance, split by cause.

    Attributes:
        more_kernels: steps ran other kernels, or another number of them.
        same_kernels_slower: the same kernels took longer, or overlapped less.
    """

    more_kernels: float
    same_kernels_slower: float


class SlowStep(msgspec.Struct, frozen=True):
    """A step that was slower than the others.

    Attributes:
        index: its place in `Ledger.steps`.
        name: its name.
        total_ns: its duration.
        over_median_ns: excess over the median step.
        what: the differences, one line each with figures, the largest first.
        trace: the file with its trace, from a flight recorder; None without.
    """

    index: int
    name: str
    total_ns: int
    over_median_ns: int
    what: tuple[str, ...]
    trace: str | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of step time or its variability. Times are in ns per step unless stated otherwise.

    Attributes:
        id: stable name, such as `launch-bound`.
        source: one of `SOURCES`.
        title: one line for people, with the main figures.
        evidence: events and times, one line each, the most telling first.
        slices: the ledger slices it is about.
        cost_ns: time per step that it accounts for.
        recoverable_ns: [low, high]. high is the time it owns; low is 0 unless the fix was measured.
        variance_share: its share of the variance of the steps; None if it explains none.
        confidence: one of `CONFIDENCES`.
        fix: what to do, in one or two sentences.
        transforms: names of the transforms that do it; may be empty.
        check: a command that shows whether the fix worked.
        false_alarm: when this would be wrong.
        information: whether it only informs and needs no fix.
    """

    id: str
    source: str
    title: str
    evidence: tuple[str, ...]
    slices: tuple[str, ...] = ()
    cost_ns: int = 0
    recoverable_ns: tuple[int, int] = (0, 0)
    variance_share: float | None = None
    confidence: str = "medium"
    fix: str
    transforms: tuple[str, ...] = ()
    check: str
    false_alarm: str
    information: bool = False


class Abstention(msgspec.Struct, frozen=True):
    """A rule that lacked the data to judge; abstaining never means "healthy".

    Attributes:
        rule: its name.
        why: the missing data.
        recapture: how to capture them.
    """

    rule: str
    why: str
    recapture: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """All kernels with one name; without a GPU, all calls of one operator.

    Attributes:
        name: as in the trace.
        count: number over all steps.
        time_ns: time over all steps; of operators, without the calls they make.
        share: of the time of all lines.
        known_ns: the part of that time whose work is known. The fields below are of that part.
        bytes: least bytes moved; None if unknown, like all fields below.
        flops: floating-point operations.
        bytes_per_s: rate reached.
        flops_per_s: rate reached.
        share_of_limit: least time at the measured rates, over the time taken. Above 1 the data came
            from a cache. None also if no rate was measured.
        bound: `memory` or `compute`, whichever takes longer at the measured rates.
    """

    name: str
    count: int
    time_ns: int
    share: float
    known_ns: int
    bytes: int | None = None
    flops: int | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    share_of_limit: float | None = None
    bound: str | None = None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels or operators compared with the limits of the device. Times are in ns per step.

    Attributes:
        lines: one for each name, longest first.
        steps: number of steps that the lines cover.
        busy_ns: time of all lines.
        known_ns: the part whose work is known and whose rates were measured.
        least_ns: time of that part at the measured rates.
        step_ns: mean duration of a step.
        share_of_limit: `least_ns` over `known_ns`; None if nothing is known.
        memory_share: share of the memory's rate, over `known_ns`; None likewise.
        compute_share: share of the matrix units' rate, over `known_ns`; None likewise.
    """

    lines: tuple[Line, ...]
    steps: int
    busy_ns: int
    known_ns: int
    least_ns: int
    step_ns: int = 0
    share_of_limit: float | None = None
    memory_share: float | None = None
    compute_share: float | None = None


class Explanation(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a workload's steps goes, and how to recover it.

    Attributes:
        source: `capture`, or the name of the trace file.
        environment: the device that ran it; of a trace file, as far as the file says.
        regime: what sets the pace, one of `REGIMES`.
        steps: the profiled steps; may be empty.
        marked: whether the trace marks its steps; otherwise all of it is one step.
        gpu: busy and idle time of the GPU over the whole trace; None without GPU events.
        variance_shares: slice to its share of the variance of the steps, adding up to 1; None if
            unknown.
        why_no_variance_shares: why they are unknown, else None.
        kernel_variance: the kernels' share in two parts; None if it cannot be split.
        slowest: the slowest steps, with the differences.
        findings: a leak, then by recoverable time, largest first, then those that only inform.
        abstained: rules that lacked data.
        roofline: the longest kernels against the limits of the device; None without a profile.
        measured: periods without the profiler; None for a trace file.
        distortion: median period with the profiler over that without; None for a trace file.
        notes: further observations by name, see `Capture`.
        problems: defects of the trace that make figures unreliable, for people.
        remarks: further caveats, for people.
        failed: the exception that ended the measurement early, else None.
        interrupted: whether the user stopped it; complete parts are kept.
    """

    source: str
    environment: DeviceFacts
    regime: str
    steps: tuple[StepTime, ...] = ()
    marked: bool = True
    gpu: GpuTotals | None = None
    variance_shares: dict[str, float] | None = None
    why_no_variance_shares: str | None = None
    kernel_variance: KernelSplit | None = None
    slowest: tuple[SlowStep, ...] = ()
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstention, ...] = ()
    roofline: Roofline | None = None
    measured: Measurement | None = None
    distortion: float | None = None
    notes: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    failed: str | None = None
    interrupted: bool = False

    @property
    def step_ns(self) -> float:
        """Mean duration of the profiled steps, in ns; 0 if no step was profiled."""
        return sum(step.total_ns for step in self.steps) / max(1, len(self.steps))

    def mean_slices_ns(self) -> dict[str, float]:
        """Mean ns per step of each time slice, in ledger order; the values add up to `step_ns`."""
        names = self.steps[0].slices_ns if self.steps else ()
        total = {name: sum(step.slices_ns.get(name, 0) for step in self.steps) for name in names}
        return {name: value / len(self.steps) for name, value in total.items()}
