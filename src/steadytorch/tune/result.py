"""The result of tuning as frozen data: all trials, the winner and its cost."""

from __future__ import annotations

import msgspec

from steadytorch.measure.measurement import Measurement
from steadytorch.measure.race import Judgement
from steadytorch.plan.record import (
    CompilerChoices,
    Evidence,
    PlanRecord,
    Speedup,
    Trial,
    candidate_results,
    gain,
    kept_plan,
    texts,
)
from steadytorch.results.candidate import Candidate
from steadytorch.results.tune import Searched, Timing
from steadytorch.verification.verdict import Reference


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a search, complete or interrupted.

    Attributes:
        baseline: the untouched workload in the last round, all samples kept.
        winner: the chosen candidate in the same round; None if the search was interrupted.
        chosen: the winner's transforms.
        regime: what bounds the untouched workload.
        candidates: all trials, in the order tried.
        not_applicable: reason why a transform does not apply, by transform.
        not_tried: reason why a candidate was not tried, by candidate.
        speedup: None if the search was interrupted.
        break_even_calls: calls after which the set-up time is paid back; None if it never is.
        reference: precision of the verification reference, with notes.
        seconds: wall-clock time of the search.
        ended: why it ended before or after its budget; empty if it did not.
        interrupted: whether the user stopped it.
        devices: devices that candidates were timed on, first the one that the speedup is from.
        devices_left_out: reason by device that was left out.
        timed_on: device by candidate, for those screened on another device than that one.
        compiler: what PyTorch's compiler chose by timing for the chosen candidate.
    """

    baseline: Measurement | None
    winner: Measurement | None
    chosen: Candidate
    regime: str
    candidates: tuple[Trial, ...]
    not_applicable: dict[str, str]
    not_tried: dict[str, str]
    speedup: Speedup | None
    break_even_calls: int | None
    reference: str
    seconds: float
    ended: str = ""
    interrupted: bool = False
    devices: tuple[str, ...] = ()
    devices_left_out: dict[str, str] = {}
    timed_on: dict[str, str] = {}
    compiler: CompilerChoices = CompilerChoices()

    def evidence(self) -> Evidence:
        """The search result as stored in a plan, without samples.

        Raises:
            ValueError: the search was interrupted.
        """
        if self.baseline is None or self.winner is None or self.speedup is None:
            raise ValueError("an interrupted search cannot serve as evidence")
        return Evidence(
            baseline=_timing(self.baseline),
            winner=_timing(self.winner),
            speedup=self.speedup,
            break_even_calls=self.break_even_calls,
            regime=self.regime,
            reference=self.reference,
            trials=self.candidates,
            not_applicable=self.not_applicable,
            not_tried=self.not_tried,
            search_s=self.seconds,
        )

    def as_result(self, plan: PlanRecord | None, *, inputs: str, trains: bool) -> Searched:
        """The search result as `--json` writes it.

        Args:
            plan: the plan that was kept; None if the search was interrupted.
            inputs: their signature, in words.
            trains: whether the workload is a training step.
        """
        return Searched(
            baseline=self.baseline,
            winner=self.winner,
            chosen=texts(self.chosen),
            regime=self.regime,
            candidates=candidate_results(self.candidates),
            not_applicable=self.not_applicable,
            not_tried=self.not_tried,
            speedup=None if self.speedup is None else gain(self.speedup),
            break_even_calls=self.break_even_calls,
            reference=self.reference,
            seconds=self.seconds,
            ended=self.ended,
            interrupted=self.interrupted,
            inputs=inputs,
            trains=trains,
            plan=None if plan is None else kept_plan(plan),
            replayed=False,
            devices=self.devices,
            devices_left_out=self.devices_left_out,
            timed_on=self.timed_on,
        )


def speedup_of(judgement: Judgement) -> Speedup:
    """Converts a relative effect on time into a speedup, which swaps the interval's ends."""

    def ratio(effect: float | None) -> float | None:
        return None if effect is None else 1.0 / (1.0 + effect)

    estimate = ratio(judgement.estimate)
    assert estimate is not None
    return Speedup(
        estimate,
        ratio(judgement.high),
        ratio(judgement.low),
        "process",
        judgement.verdict,
        judgement.pairs,
    )


def untouched_speedup(pairs: int) -> Speedup:
    """The speedup of 1.0 of a plan that leaves the workload untouched.

    Args:
        pairs: number of pairs that did not show a candidate to be faster.
    """
    return Speedup(1.0, None, None, "process", "untouched", pairs)


def reference_text(reference: Reference | None) -> str:
    """The precision of the verification reference, with the reference's note if any."""
    if reference is None:
        return "none"
    return f"{reference.precision}; {reference.note}" if reference.note else reference.precision


def break_even_calls(
    gain_ns: float, setup_s: float | None, baseline_setup_s: float | None
) -> int | None:
    """Number of calls that pay back a longer set-up; None without a gain or a set-up time."""
    if gain_ns <= 0 or setup_s is None or baseline_setup_s is None:
        return None
    return max(0, round((setup_s - baseline_setup_s) / (gain_ns * 1e-9)))


def _timing(measured: Measurement) -> Timing:
    return Timing(
        measured.metric,
        measured.median_ns,
        measured.median_ci_ns,
        measured.p90_ns,
        measured.p99_ns,
        len(measured.samples_ns),
    )
