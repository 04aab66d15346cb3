"""Answers of a rule: a finding with its evidence, or an abstention with its reason."""

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
"""Reason of GPU rules that abstain because nothing ran on a GPU."""
SOURCES = (
    "memory bandwidth",
    "kernel-launch overhead",
    "hardware contention",
    "synchronisation",
    "compiler",
)
CONFIDENCES = ("high", "medium", "low")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of time or variability. Times are ns per step unless stated otherwise.

    Attributes:
        id: stable name, such as `launch-bound`.
        source: one of `SOURCES`.
        title: one line with the figures that matter.
        evidence: events and times that support it, one line each, most telling first.
        slices: ledger slices that it claims.
        cost_ns: time per step that it accounts for.
        recoverable_ns: [lo, hi]: hi is the time the cause owns; lo is 0 unless the fix was
            measured.
        variance_share: share of the steps' variance that it explains; None if it explains none.
        confidence: one of `CONFIDENCES`.
        fix: what to do, in one or two sentences.
        transforms: names of transforms that apply the fix; empty if there is none.
        check: a command that shows whether the fix worked.
        false_alarm: condition under which the finding is wrong, as a clause after "if".
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
    """A rule that could not tell. This never means "healthy".

    Attributes:
        rule: name of the rule.
        why: what is missing.
        recapture: how to capture it.
    """

    rule: str
    why: str
    recapture: str


@dataclass(frozen=True, eq=False)
class Case:
    """Input of the rules; whatever was not captured is None.

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
"""Answer of a rule; an empty sequence means that all inputs were there and nothing is wrong."""

Rule = Callable[[Case], Verdict]
