"""Lets all ranks of a process group agree on one plan."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import msgspec

from steadytorch.plan.files import BrokenError, decoded, encoded
from steadytorch.plan.fingerprint import Key, canonical_json, flat
from steadytorch.plan.record import PlanRecord, texts
from steadytorch.ranks.agreement import Agreement, Ballot, Refusal
from steadytorch.ranks.group import Ranks
from steadytorch.runtime.dispatch import CallContext, Resolution, Resolver

P = TypeVar("P", bound=PlanRecord)


class Proposed(NamedTuple, Generic[P]):
    """A plan that all ranks hold but have not confirmed yet.

    Attributes:
        plan: the plan, equal on all ranks in key and candidate.
        is_new: whether it came from another rank.
        confirm: takes the reason why this rank cannot serve it, or None, and returns why no rank
            serves it, or None. Must be called.
    """

    plan: P
    is_new: bool
    confirm: Callable[[str | None], str | None]


def propose(
    ranks: Ranks,
    key: Key,
    plan: P | None,
    plan_type: type[P],
    *,
    mode: str = "",
    problem: str | None = None,
    violation: Callable[[P], str | None] = lambda plan: None,
    search: Callable[[tuple[str, ...]], P | str] | None = None,
    gpu: str = "",
) -> Proposed[P] | Refusal:
    """Finds one plan for a key that all ranks of a process group can serve.

    Args:
        ranks: this process and its group.
        key: the plan's key; must be equal on all ranks.
        plan: this rank's plan; None for a miss.
        plan_type: the type of plans.
        mode: the mode asked for; must be equal on all ranks.
        problem: why this rank must run untouched.
        violation: why a plan from another rank must not be served, or None.
        search: finds a plan where no rank has one, given the UUIDs of all ranks' GPUs, or says why
            not; called on the leader only.
        gpu: UUID of this rank's GPU; empty on a CPU.
    """
    made: list[P] = []

    def found(gpus: tuple[str, ...]) -> tuple[str, bytes] | str:
        result = "there is no search" if search is None else search(gpus)
        if isinstance(result, str):
            return result
        made.append(result)
        return choice(result), _payload(result)

    agreement = Agreement(ranks, f"plan {key.digest[:12]}")
    fields = {name: str(value) for name, value in flat(key).items()}
    payload: bytes | None = None
    if plan is not None and problem is None:
        try:
            payload = _payload(plan)
        except (BrokenError, TypeError, ValueError) as error:
            problem = f"the plan has no JSON form: {error}"
    ballot = Ballot(
        hashlib.sha256(f"{key.digest} {mode}".encode()).hexdigest(),
        {**fields, "mode": mode},
        None if plan is None else choice(plan),
        payload,
        problem,
        None if search is None else found,
        gpu,
    )
    answer = agreement.propose(ballot)
    if isinstance(answer, Refusal):
        return answer
    fault: str | None = None
    chosen = made[0] if made else plan
    if answer is not None:
        try:
            chosen = decoded(answer, plan_type).payload
            fault = "the plan is for another key" if chosen.key != key else violation(chosen)
        except BrokenError as error:
            fault = f"the plan from another rank {error}"
    if chosen is None or fault is not None:
        fault = fault or "the plan is missing"
        return agreement.finish(fault) or Refusal(fault)
    return Proposed(chosen, answer is not None, _confirming(agreement))


def refusal(plan: PlanRecord, ranks: Ranks, problem: str | None) -> str | None:
    """Returns why no rank serves this plan, or None if all ranks can serve it."""
    agreement = Agreement(ranks, f"plan {plan.id}")
    answer = agreement.propose(_ballot(plan, problem))
    if not isinstance(answer, Refusal):
        answer = agreement.finish()
    return None if answer is None else told(answer)


def resolve(plan: PlanRecord, ranks: Ranks, alone: Resolver, context: CallContext) -> Resolution:
    """Resolves a call with `alone`; the plan serves only if every rank has built it."""
    resolution = alone(context)
    if not resolution.candidate:
        return resolution
    agreement = Agreement(ranks, f"plan {plan.id}")
    answer = agreement.propose(_ballot(plan, None))
    if isinstance(answer, Refusal):
        return Resolution(None, told(answer))
    return replace(resolution, confirm=_confirming(agreement))


def shared_prefix(ranks: Ranks, what: str) -> str | Refusal:
    """Agrees on a key prefix for all ranks of a group, which no earlier run has used."""
    own = secrets.token_hex(16).encode() if ranks.rank == 0 else None
    chosen = None if own is None else hashlib.sha256(own).hexdigest()
    agreement = Agreement(ranks, what)
    answer = agreement.propose(Ballot(what, choice=chosen, payload=own))
    if isinstance(answer, Refusal):
        return answer
    refusal = agreement.finish()
    return refusal or f"{ranks.name}/{(answer or own or b'').decode()}"


def told(refusal: Refusal) -> str:
    """Formats the reason why all ranks run untouched, for reports."""
    return f"all ranks run untouched: {refusal.reason}"


def choice(plan: PlanRecord) -> str:
    """Returns a digest of a plan's key and transforms, without its measurements."""
    decision = [plan.key.digest, list(texts(plan.candidate)), plan.trains]
    return hashlib.sha256(canonical_json(decision)).hexdigest()


def _ballot(plan: PlanRecord, problem: str | None) -> Ballot:
    fields = {"plan": plan.id, "transforms": " + ".join(texts(plan.candidate))}
    return Ballot(choice(plan), fields, choice(plan), problem=problem)


def _payload(plan: PlanRecord) -> bytes:
    return encoded(plan.key, msgspec.structs.replace(plan, path=None))


def _confirming(agreement: Agreement) -> Callable[[str | None], str | None]:
    def confirm(problem: str | None) -> str | None:
        refusal = agreement.finish(problem)
        return None if refusal is None else told(refusal)

    return confirm
