"""Plans as data: the chosen candidate, the evidence and the key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from steadytorch.plan.fingerprint import Key
from steadytorch.results.candidate import Candidate
from steadytorch.results.shown import Shown
from steadytorch.results.signature import Signature
from steadytorch.results.tune import CandidateResult, Gain, KeptPlan, Replayed, Status, Timing


class Speedup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed-up over the untouched workload, from pairs timed after the plan was chosen.

    Attributes:
        estimate: time of the baseline over time of the winner.
        low: lower end of the 99 % interval; None without an interval.
        high: upper end of the 99 % interval; None without an interval.
        claim: `process`: the speed-up holds for the processes that were timed.
        verdict: `faster`, or `untouched` if nothing was shown to be faster.
        pairs: number of timed pairs.
    """

    estimate: float
    low: float | None
    high: float | None
    claim: str
    verdict: str
    pairs: int


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One candidate of a search and its result.

    Attributes:
        transforms: the candidate; empty for the untouched workload.
        precision: its precision class: same, tf32, bf16, fp16 or int8.
        suggested_by: ids of the findings of `steady explain` that suggest it.
        status: ok, rejected (broke a rule, or its process died), failed (could not be applied) or
            skipped.
        reason: why it is not ok, or what it would need. For the untouched workload, that it exceeds
            the memory limit.
        allowed: whether the user's precision allows it; others are measured for information only.
        error: relative L2 error against the reference; None if not verified.
        peak_memory_bytes: peak device memory (CUDA) or resident host memory (CPU).
        setup_s: seconds to apply it and make the first call.
        median_ns: screening median per iteration; the winner is measured again.
        median_ci_ns: 95 % interval of the median; None without an interval.
        p90_ns: 90th percentile of all samples.
        p99_ns: 99th percentile; None with too few samples.
        samples: number of iterations timed.
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
    """The measurements that led to the choice of a plan.

    Attributes:
        baseline: the untouched workload in the confirming round.
        winner: the chosen candidate in the confirming round.
        speedup: winner against baseline.
        break_even_calls: calls after which set-up is paid back; None for never.
        regime: the bound of the untouched workload.
        reference: precision of the verification reference, with notes.
        trials: every candidate of the search.
        not_applicable: reason by transform that does not apply.
        not_tried: reason by candidate that was not tried.
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


_CACHED = re.compile(r"[a-z0-9]{2}/[A-Za-z0-9_-]{8,128}\.best_config")


class CompilerChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Autotuning choices of PyTorch's compiler, stored so that replays make the same choices.

    Attributes:
        kernels: launch configurations of Triton kernels in JSON, as the compiler's cache names and
            holds them.
        padded: whether to pad matrix products, by shapes, strides and dtypes.

    Raises:
        ValueError: a name is not one of the compiler's cache.
    """

    kernels: dict[str, dict[str, Any]] = {}
    padded: dict[str, bool] = {}

    def __post_init__(self) -> None:
        for name in self.kernels:
            if not _CACHED.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is no name in the compiler's cache")


class PlanRecord(Shown, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan as a data record. Loading a plan runs no code: its transforms come from a closed list.

    Attributes:
        name: name of the tuned workload.
        signature: the inputs that it serves.
        candidate: the transforms in order; empty if nothing beat the untouched workload.
        evidence: the measurements behind the choice.
        key: the conditions under which it is valid.
        created: ISO 8601, UTC.
        version: version of steadytorch.
        path: its file; None if it is in memory only.
        trains: for training plans, `trained_fingerprint` of the model; None for inference. The key
            covers loss and optimizer too, which `apply` does not get.
        libraries: versions of the libraries beside PyTorch that the candidate runs on.
        compiler: autotuning choices of PyTorch's compiler for the measured code.
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
    libraries: dict[str, str] = {}
    compiler: CompilerChoices = CompilerChoices()

    @property
    def id(self) -> str:
        """The plan's id: the first 12 hexadecimal digits of its key's digest."""
        return self.key.digest[:12]


def as_result(plan: PlanRecord) -> Replayed:
    """The result of replaying a plan: the plan's evidence in the form that `--json` writes."""
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
    """The summary of a plan for results: its id, file, transforms and objective."""
    return KeptPlan(plan.id, plan.path, texts(plan.candidate), plan.key.objective)


def candidate_results(trials: Sequence[Trial]) -> tuple[CandidateResult, ...]:
    """Converts the trials of a search for results, with their transforms as text."""
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
    """Converts a `Speedup` to a `Gain`, its type in results."""
    return Gain(**msgspec.structs.asdict(speedup))


def texts(candidate: Candidate) -> tuple[str, ...]:
    """The transforms of a candidate as text."""
    return tuple(map(str, candidate))
