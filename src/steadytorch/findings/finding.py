"""What a rule may say: a finding with its evidence, or that it cannot tell and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from steadytorch.bench.measure import ProcessMeasurement
    from steadytorch.bench.series import Series
    from steadytorch.device.facts import DeviceFacts
    from steadytorch.ledger.ledger import Ledger
    from steadytorch.ledger.variability import VarianceShares
    from steadytorch.rates.device_rates import Rates
    from steadytorch.traces.events import Trace
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


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of time or variability. All times are ns per step unless said otherwise.

    Attributes:
        id: stable name, as `launch-bound`.
        source: one of `SOURCES`.
        title: one line for people, with the figures that matter.
        evidence: the events and times it rests on, one line each, the most telling first.
        slices: ledger slices it is about.
        cost_ns: time per step that it accounts for.
        recoverable_ns: [lo, hi]: hi is what it owns; lo is 0 unless the fix was measured.
        variance_share: of the variance of the steps, where it explains some; else None.
        confidence: one of `CONFIDENCES`.
        fix: what to do, one or two sentences.
        transforms: names of the transforms that would do it; empty where none does.
        check: a command that shows whether the fix worked.
        false_alarm: when this would be wrong.
        information: whether it only informs, and nothing needs mending.
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
    """A rule that could not tell: never the same as "healthy".

    Attributes:
        rule: its name.
        why: what is missing.
        recapture: how to capture what it needs.
    """

    rule: str
    why: str
    recapture: str


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
