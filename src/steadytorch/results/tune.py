"""The result of a tuning search, or of replaying a stored plan, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from steadytorch.results.measure import Measurement
from steadytorch.results.shown import Shown

Status = Literal["ok", "rejected", "failed", "skipped"]


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Measurement` without its samples. Times are in ns per iteration.

    Attributes mean the same as in `Measurement`; `samples` is the number of samples.
    """

    metric: str
    median_ns: float
    median_ci_ns: tuple[float, float] | None
    p90_ns: float
    p99_ns: float | None
    samples: int


class Gain(msgspec.Struct, frozen=True):
    """The winner's speedup over the untouched workload, from pairs timed after it was chosen.

    Attributes:
        estimate: time of the baseline over time of the winner; None if it is not a number.
        low: lower end of the 99 % interval; None if the pairs support none.
        high: upper end; None likewise.
        claim: `process`: it holds for the processes that were timed.
        verdict: `faster`, or `untouched` if no candidate was shown to be.
        pairs: number of pairs.
    """

    estimate: float | None
    low: float | None
    high: float | None
    claim: str
    verdict: str
    pairs: int


class CandidateResult(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate of a search, and its outcome.

    Attributes:
        transforms: in order of application; empty for the untouched workload.
        precision: `same`, `tf32`, `bf16`, `fp16` or `int8`.
        suggested_by: ids of the findings of `steady explain` that speak for it.
        status: `ok`, `rejected`, `failed` or `skipped`.
        reason: why it is not ok, or its requirement; None if there is neither.
        allowed: whether the user's precision admits it; others are timed for information.
        error: relative L2 error against the reference; None if unverified.
        peak_memory_bytes: peak of device memory (CUDA) or of resident host memory (CPU).
        setup_s: seconds to apply it and make the first call.
        median_ns: screening median per iteration; the winner is timed again afterwards.
        median_ci_ns: its 95 % interval; None if the samples support none.
        p90_ns: 90th percentile.
        p99_ns: 99th percentile; None with too few samples.
        samples: number of iterations timed.
    """

    transforms: tuple[str, ...]
    precision: str = "same"
    suggested_by: tuple[str, ...] = ()
    status: Status
    reason: str | None
    allowed: bool = True
    error: float | None
    peak_memory_bytes: int | None
    setup_s: float | None
    median_ns: float | None
    median_ci_ns: tuple[float, float] | None = None
    p90_ns: float | None = None
    p99_ns: float | None = None
    samples: int = 0


class KeptPlan(msgspec.Struct, frozen=True):
    """The plan that a search produced.

    Attributes:
        id: first digits of its key's digest.
        path: its file; None if it is in memory only.
        transforms: in order of application; empty to leave the workload untouched.
        objective: `latency`, `p99`, `throughput` or `contended`.
    """

    id: str
    path: str | None
    transforms: tuple[str, ...]
    objective: str


class TuneReport(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tuning search; decoded as `Searched` or `Replayed`.

    Attributes:
        chosen: the winner's transforms.
        regime: what bounds the untouched workload.
        candidates: every candidate, in the order tried.
        not_applicable: transform to the reason why it was not tried.
        not_tried: candidate to the reason why it was not tried.
        speedup: of the winner; None if the search was interrupted.
        break_even_calls: calls that pay back the set-up; None if they never do.
        reference: precision of the verification reference, with notes.
        seconds: wall-clock time of the search.
        ended: why it ended before or after its budget; empty if it did not.
        interrupted: whether the user stopped it.
        inputs: their signature, in words.
        trains: whether the workload is a training step.
        plan: the plan; None if the search was interrupted.
        replayed: whether a stored plan was replayed.
        devices: devices that candidates were timed on; the winner's figures are from the first one.
            Empty for a stored plan.
        devices_left_out: device to the reason why it was left out.
        timed_on: candidate to the device whose untouched workload it was screened against, where
            that is not the first of `devices`.
    """

    chosen: tuple[str, ...]
    regime: str
    candidates: tuple[CandidateResult, ...]
    not_applicable: dict[str, str]
    not_tried: dict[str, str]
    speedup: Gain | None
    break_even_calls: int | None
    reference: str
    seconds: float
    ended: str = ""
    interrupted: bool
    inputs: str
    trains: bool
    plan: KeptPlan | None
    replayed: bool
    devices: tuple[str, ...] = ()
    devices_left_out: dict[str, str] = {}
    timed_on: dict[str, str] = {}

    @property
    def sides(self) -> tuple[Measurement | Timing | None, Measurement | Timing | None]:
        """Timings of the untouched baseline and of the winner."""
        raise NotImplementedError

    @property
    def winner_tried(self) -> CandidateResult | None:
        """The winner's screening result; None if the winner is not among the candidates."""
        return self._tried(self.chosen)

    @property
    def untouched_tried(self) -> CandidateResult | None:
        """The untouched workload's screening result; None if it was not screened."""
        return self._tried(())

    def _tried(self, transforms: tuple[str, ...]) -> CandidateResult | None:
        found = [each for each in self.candidates if each.transforms == transforms]
        return found[-1] if found else None


class Searched(TuneReport, frozen=True, kw_only=True):
    """The result of a new search, with all samples of the round that confirmed the winner.

    Attributes:
        baseline: the untouched workload; None if it was not timed.
        winner: the winner; None if the search was interrupted.
    """

    baseline: Measurement | None
    winner: Measurement | None

    @property
    def sides(self) -> tuple[Measurement | None, Measurement | None]:
        """Timings of the untouched baseline and of the winner."""
        return self.baseline, self.winner


class Replayed(TuneReport, frozen=True, kw_only=True):
    """The result of replaying a stored plan: timing summaries without samples.

    Attributes:
        baseline: the untouched workload, when the plan was made.
        winner: the winner in the same round.
    """

    baseline: Timing
    winner: Timing

    @property
    def sides(self) -> tuple[Timing, Timing]:
        """Timings of the untouched baseline and of the winner."""
        return self.baseline, self.winner
