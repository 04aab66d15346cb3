"""A comparison of one job's ranks: which rank is late, and how long the others wait."""

from __future__ import annotations

import msgspec

from steadytorch.results.explain import Abstention, Finding
from steadytorch.results.machine import DeviceFacts
from steadytorch.results.shown import Shown


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Mean times of one rank, in ns per step.

    Attributes:
        rank: its number.
        file: name of its trace.
        step_ns: duration of a step; it is the sum of the slices, `transfer_ns` and `waiting_ns`.
        slices_ns: slice to its time, without communication that no work hides.
        transfer_ns: communication that no work hides, without waiting.
        waiting_ns: the part of that communication in which this rank waited for later ones.
        communication_ns: time with a collective running, hidden by work or not.
        overlap: share of the communication that work hides; None without communication.
    """

    rank: int
    file: str
    step_ns: float
    slices_ns: dict[str, float]
    transfer_ns: float
    waiting_ns: float
    communication_ns: float
    overlap: float | None


class JobStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a distributed job, compared over its ranks.

    Attributes:
        index: its number in the traces.
        without_waiting_ns: step of the latest rank, without its waiting.
        latest: the rank whose step without waiting is longest.
        late_ns: its excess over the median of the other ranks' steps without waiting.
    """

    index: int
    without_waiting_ns: int
    latest: int
    late_ns: int


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank for which the other ranks wait longer than chance explains.

    Attributes:
        rank: its number.
        slice: where it takes longest beyond the median of the others.
        late_ns: lateness per step, over all steps; steps with another latest rank count as 0.
        steps: numbers of the steps at which it was the latest.
        variance_share: its share of the variance of the job's steps; None if unknown.
    """

    rank: int
    slice: str
    late_ns: float
    steps: tuple[int, ...]
    variance_share: float | None


class RankComparison(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of one job's ranks, over the steps that all given ranks recorded.

    Attributes:
        environment: the device of the first rank, as far as its trace says.
        ranks: means by rank, in order of rank.
        steps: the steps in order.
        late: late ranks, the latest first.
        variance_shares: `rank 0`, ... and `all ranks` to the share of the variance of the job's
            steps (`JobStep.without_waiting_ns`), adding up to 1; None if unknown. A rank's part of
            a step is its lateness where it was the latest.
        why_no_variance_shares: why they are unknown, else None.
        findings: as in an explanation.
        abstained: rules that lacked data.
        remarks: caveats, for people.
    """

    environment: DeviceFacts
    ranks: tuple[RankTimes, ...]
    steps: tuple[JobStep, ...]
    late: tuple[LateRank, ...] = ()
    variance_shares: dict[str, float] | None = None
    why_no_variance_shares: str | None = None
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstention, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def step_ns(self) -> float:
        """Mean step duration over all ranks and steps, in ns."""
        return sum(each.step_ns for each in self.ranks) / len(self.ranks)
