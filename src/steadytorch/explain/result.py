"""An explanation: where a step's time and variability go, as data that opens on any machine."""

from __future__ import annotations

from typing import Any

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError
from steadytorch.findings.finding import Abstention, Finding
from steadytorch.ledger.ledger import GpuTotals
from steadytorch.ledger.variability import KernelSplit, SlowStep
from steadytorch.measure.measurement import Measurement
from steadytorch.rates.roofline import Roofline
from steadytorch.rates.utilisation import Utilisation


class StepTime(msgspec.Struct, frozen=True):
    """One profiled step.

    Attributes:
        index: as the trace numbers it.
        total_ns: how long it took.
        slices_ns: where that went; the slices add up to the total.
        host_columns_ns: the same cut as PyTorch's TensorBoard plug-in cut it, see
            `ledger.host_columns`; empty for a step without a GPU.
    """

    index: int
    total_ns: int
    slices_ns: dict[str, int]
    host_columns_ns: dict[str, int] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a workload's steps goes, and what would bring it back.

    Attributes:
        source: "capture", or the name of the trace file.
        environment: the device that ran it; for a trace file, what that says of it.
        regime: what sets the pace, one of `explain.regime.REGIMES`.
        steps: the profiled steps; empty where nothing was profiled.
        marked: whether the trace marks its steps; else all of it counts as one.
        gpu: busy and idle time of the GPU over the whole trace; None without GPU events.
        utilisation: how well the kernels fill that GPU; None likewise.
        variance_shares: slice to its share of the variance of the steps, adding up to 1; None
            where none can be told.
        why_no_variance_shares: why not, else None.
        kernel_variance: the kernels' share in two; None where it cannot be split.
        slowest: steps that took longer than the others, with what was different.
        findings: by recoverable time, the largest first; those that only inform at the end.
        abstained: rules that could not tell, with how to capture what they need.
        roofline: kernels by time, and how near they come to what the device can do; only the
            longest `session.MOST_LINES` are kept. None where nothing was profiled.
        measured: periods without the profiler; None for a trace file.
        distortion: median period with the profiler over that without; None for a trace file.
        notes: what else was seen, by name; see `explain.capture.Capture`.
        problems: what is wrong with the trace, so that figures are not to be trusted, for people.
        remarks: what else one must know to judge the figures, likewise.
        failed: the exception that ended the measurement early, None if none did.
        interrupted: whether the user stopped it; what was complete is kept.
    """

    source: str
    environment: DeviceFacts
    regime: str
    steps: tuple[StepTime, ...] = ()
    marked: bool = True
    gpu: GpuTotals | None = None
    utilisation: Utilisation | None = None
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
        """Mean time of the profiled steps; 0 where there are none."""
        return sum(step.total_ns for step in self.steps) / max(1, len(self.steps))

    def mean_slices_ns(self) -> dict[str, float]:
        """Slice to its mean time per step, in the ledger's order; they add up to `step_ns`."""
        names = self.steps[0].slices_ns if self.steps else ()
        total = {name: sum(step.slices_ns.get(name, 0) for step in self.steps) for name in names}
        return {name: value / len(self.steps) for name, value in total.items()}

    def to_json(self) -> str:
        """The explanation as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Explanation:
        """Reads what `to_json` wrote.

        Raises:
            UsageError: the text is not JSON, or not of this shape.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsageError(f"not an explanation: {error}") from None
