"""Answers of a diagnosis rule: findings with evidence, or an abstention with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steadytorch.results.explain import Abstention, Finding

if TYPE_CHECKING:
    from steadytorch.bench.measure import ProcessMeasurement
    from steadytorch.bench.series import Series
    from steadytorch.device.facts import DeviceFacts
    from steadytorch.findings.watched_steps import WatchedSteps
    from steadytorch.ledger.ledger import Ledger
    from steadytorch.ledger.variability import VarianceShares
    from steadytorch.rates.device_rates import Rates
    from steadytorch.traces.events import Trace
    from steadytorch.workload.workload import Workload

NO_GPU_EVENTS = "the trace has no GPU events"
"""Reason of GPU rules that abstain because nothing ran on a GPU."""
SOURCES = (
    "memory bandwidth",
    "kernel-launch overhead",
    "hardware contention",
    "synchronisation",
    "compiler",
)
CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, eq=False)
class Case:
    """Input of the diagnosis rules; data that was not captured is None.

    Attributes:
        trace: the profiled steps.
        ledger: where their time went.
        variance: shares of the steps' variance; None for fewer than three steps.
        measured: the unprofiled measurement.
        series: its samples on the host's clock, with the recording of the machine.
        workload: what was run; rules only inspect its structure.
        facts: facts of the device that ran it.
        rates: measured limits of this device; None if not measured.
        notes: other observations of the capture, by name: see `capture`.
        watched: the steps of a script; None for a workload or a trace.
    """

    trace: Trace | None = None
    ledger: Ledger | None = None
    variance: VarianceShares | None = None
    measured: ProcessMeasurement | None = None
    series: Series | None = None
    workload: Workload | None = None
    facts: DeviceFacts | None = None
    rates: Rates | None = None
    notes: dict[str, object] | None = None
    watched: WatchedSteps | None = None


Verdict = Sequence[Finding] | Abstention
"""Answer of a rule; an empty sequence means that all inputs were there and nothing is wrong."""

Rule = Callable[[Case], Verdict]
