"""A plan as data: the chosen candidate, the evidence, and what the plan is valid for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steadytorch.plan.fingerprint import Key
from steadytorch.results.candidate import Candidate
from steadytorch.results.signature import Signature
from steadytorch.results.tune import CandidateResult, Gain, KeptPlan, Replayed, Status, Timing


class Speedup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many times as fast as the untouched workload, from pairs taken after the choice.

    Attributes:
        estimate: time of the baseline over time of the winner.
        low: lower end of its 99 % interval, None where none may be claimed.
        high: upper end.
        claim: `process`: it holds for the processes that were timed.
        verdict: faster; or untouched, where nothing was shown to be and the plan changes nothing.
        pairs: how many it rests on.
    """

    estimate: float
    low: float | None
    high: float | None
    claim: str
    verdict: str
    pairs: int


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One candidate of a search and what became of it.

    Attributes:
        transforms: the candidate; empty for the untouched workload.
        precision: its class: same, tf32, bf16 or fp16.
        suggested_by: ids of the findings of `steady explain` that speak for it.
        status: ok, rejected (broke a rule, or its process died), failed (could not be applied) or
            skipped.
        reason: why it is not ok, or what it would need; of the untouched workload, that it takes
            more memory than it may.
        allowed: whether the user's precision admits it; others are measured for information only.
        error: relative L2 error against the reference; None if not verified.
        peak_memory_bytes: device memory (CUDA) or resident host memory (CPU) at the most.
        setup_s: seconds to apply it and make the first call.
        median_ns: screening median per iteration; the winner's speed is measured afresh.
        median_ci_ns: its 95 % interval where one may be claimed.
        p90_ns: 90th percentile of all its samples.
        p99_ns: 99th percentile where there are samples enough.
        samples: how many iterations these rest on.
    """

    transforms: Candidate
    precision: str = "same"
    suggested_by: tuple[str, ...] = ()
    status: str = "ok"
    reason: str | None = None
    allowed: bool = True
    error: float | None = None
    peak_memory_bytes: int | None = None
    setup_s: float | None = None
    median_ns: float | None = None
    median_ci_ns: tuple[float, float] | None = None
    p90_ns: float | None = None
    p99_ns: float | None = None
    samples: int = 0


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why the plan was chosen.

    Attributes:
        baseline: the untouched workload, in the round that confirmed the choice.
        winner: the chosen candidate in that same round.
        speedup: winner against baseline.
        break_even_calls: calls after which the set-up time is paid back; None if it never is.
        regime: what bounds the untouched workload.
        reference: precision of the verification reference, with notes.
        trials: every candidate of the search.
        not_applicable: transform to the reason why it was not tried.
        not_tried: candidate to the reason why it was not tried.
        search_s: wall-clock seconds of the search.
    """

    baseline: Timing
    winner: Timing
    speedup: Speedup
    break_even_calls: int | None
    regime: str
    reference: str
    trials: tuple[Trial, ...]
    not_applicable: dict[str, str]
    not_tried: dict[str, str]
    search_s: float


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data only: loading one runs no code, and its transforms come from a closed list.

    Attributes:
        name: of the workload it was tuned for.
        signature: the inputs it serves.
        candidate: the transforms, in order; empty if nothing beat the untouched workload.
        evidence: why.
        key: what it is valid for.
        created: ISO 8601, UTC.
        version: of steadytorch.
        path: its file; None while it lives in memory only.
        trains: of a plan for training steps, what identifies their model; None for inference. The
            key identifies the loss and the optimizer as well, which `apply` is not given.
    """

    name: str
    signature: Signature
    candidate: Candidate
    evidence: Evidence
    key: Key
    created: str
    version: str
    path: str | None = None
    trains: str | None = None

    @property
    def id(self) -> str:
        """The first 12 digits of the key's digest: how people refer to it."""
        return self.key.digest[:12]


def as_result(plan: PlanRecord) -> Replayed:
    """The result of replaying a plan: its evidence, as `--json` writes it."""
    evidence = plan.evidence
    return Replayed(
        baseline=evidence.baseline,
        winner=evidence.winner,
        chosen=texts(plan.candidate),
        regime=evidence.regime,
        candidates=candidate_results(evidence.trials),
        not_applicable=evidence.not_applicable,
        not_tried=evidence.not_tried,
        speedup=gain(evidence.speedup),
        break_even_calls=evidence.break_even_calls,
        reference=evidence.reference,
        seconds=evidence.search_s,
        interrupted=False,
        inputs=plan.key.signature,
        trains=plan.trains is not None,
        plan=kept_plan(plan),
        replayed=True,
    )


def kept_plan(plan: PlanRecord) -> KeptPlan:
    """What results say of a plan."""
    return KeptPlan(plan.id, plan.path, texts(plan.candidate), plan.key.objective)


def candidate_results(trials: Sequence[Trial]) -> tuple[CandidateResult, ...]:
    """Trials with their transforms as text."""
    return tuple(
        CandidateResult(
            **{
                **msgspec.structs.asdict(trial),
                "status": msgspec.convert(trial.status, Status),
                "transforms": texts(trial.transforms),
            }
        )
        for trial in trials
    )


def gain(speedup: Speedup) -> Gain:
    """A speedup as results show it."""
    return Gain(**msgspec.structs.asdict(speedup))


def texts(candidate: Candidate) -> tuple[str, ...]:
    """The transforms of a candidate as text."""
    return tuple(map(str, candidate))
