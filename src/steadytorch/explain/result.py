"""An explanation of a step's time and variability, as data that opens on any machine."""

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
        index: number in the trace.
        total_ns: length of the step.
        slices_ns: time by slice; the slices add up to the total.
        host_columns_ns: time as PyTorch's TensorBoard plug-in cuts it, see `ledger.host_columns`;
            empty for a step without a GPU.
    """

    index: int
    total_ns: int
    slices_ns: dict[str, int]
    host_columns_ns: dict[str, int] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a workload's steps goes, and how much each fix could recover.

    Attributes:
        source: "capture", or the name of the trace file.
        environment: the device that ran it; for a trace file, its facts from the trace.
        regime: bottleneck of the step, one of `explain.regime.REGIMES`.
        steps: the profiled steps; empty if nothing was profiled.
        marked: whether the trace marks its steps; if not, the whole trace counts as one.
        gpu: busy and idle time of the GPU over the whole trace; None without GPU events.
        utilisation: how well the kernels fill that GPU; None without GPU events.
        variance_shares: share of each slice in the variance of the steps, adding up to 1; None if
            unknown.
        why_no_variance_shares: reason for having no shares, else None.
        kernel_variance: the kernels' share in two parts; None if it cannot be split.
        slowest: steps slower than the others, with their differences.
        findings: by recoverable time, largest first; informational ones at the end.
        abstained: rules that could not tell, with how to capture their inputs.
        roofline: kernels by time, with their share of the device's limits; only the longest
            `session.MOST_LINES` are kept. None if nothing was profiled.
        measured: periods without the profiler; None for a trace file.
        distortion: median period with the profiler over that without; None for a trace file.
        notes: other observations, by name; see `explain.capture.Capture`.
        problems: faults of the trace that make figures unreliable, as sentences.
        remarks: other caveats, as sentences.
        failed: exception that ended the measurement early; None if none did.
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
        """Mean length of the profiled steps; 0 if there are none."""
        return sum(step.total_ns for step in self.steps) / max(1, len(self.steps))

    def mean_slices_ns(self) -> dict[str, float]:
        """Mean time of each slice per step, in the ledger's order; they add up to `step_ns`."""
        names = self.steps[0].slices_ns if self.steps else ()
        total = {name: sum(step.slices_ns.get(name, 0) for step in self.steps) for name in names}
        return {name: value / len(self.steps) for name, value in total.items()}

    def to_json(self) -> str:
        """The explanation as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Explanation:
        """Read an explanation that `to_json` wrote.

        Raises:
            UsageError: the text is not JSON, or not of this shape.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsageError(f"not an explanation: {error}") from None
