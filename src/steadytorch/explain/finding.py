"""What a rule may say: a finding with its evidence, or that it cannot tell and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steadytorch.results.explain import Abstention, Finding

if TYPE_CHECKING:
    from steadytorch.device.facts import DeviceFacts
    from steadytorch.explain.events import Trace
    from steadytorch.explain.ledger import Ledger
    from steadytorch.explain.rates import Rates
    from steadytorch.explain.variability import VarianceShares
    from steadytorch.trial.measure import ProcessMeasurement
    from steadytorch.trial.series import Series
    from steadytorch.workload.workload import Workload

NO_GPU_EVENTS = "the trace has no GPU events"
"""How rules about a GPU say that there was none."""
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
    """All that rules may look at; what was not captured is None.

    Attributes:
        trace: the profiled steps.
        ledger: where their time went.
        variance: shares of the variance of the steps; None for fewer than three.
        measured: the unprofiled measurement.
        series: its samples on the host's clock, with the recording beside them.
        workload: what was run; only its structure is looked at.
        facts: of the device that ran it.
        rates: what this device reaches; None where not measured.
        notes: what else the capture saw, by name: see `capture`.
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


Verdict = Sequence[Finding] | Abstention
"""A rule's answer; no findings where all that it needs is there and nothing is wrong."""

Rule = Callable[[Case], Verdict]
