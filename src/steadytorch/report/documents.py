"""Results as the JSON objects that `--json` writes."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.plan.plan import Plan, Trial
from steadytorch.tune.result import TuneResult

SCHEMA = 1


def _document(kind: str, workload: str, facts: DeviceFacts, fields: dict[str, Any]) -> bytes:
    head = {
        "schema": SCHEMA,
        "kind": kind,
        "workload": workload,
        "environment": msgspec.to_builtins(facts),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return msgspec.json.format(msgspec.json.encode({**head, **fields}), indent=1) + b"\n"


def _trial(trial: Trial) -> dict[str, Any]:
    return {**msgspec.to_builtins(trial), "transforms": [str(spec) for spec in trial.transforms]}


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "id": plan.id,
        "path": plan.path,
        "transforms": [str(spec) for spec in plan.candidate],
    }


def tune_document(
    workload: str, facts: DeviceFacts, result: TuneResult, plan: Plan | None
) -> bytes:
    """A search, with all samples; `plan` is None where the search was cut short."""
    fields = msgspec.to_builtins(result)
    fields["candidates"] = [_trial(trial) for trial in result.candidates]
    fields["chosen"] = [str(spec) for spec in result.chosen]
    return _document("tune", workload, facts, {**fields, "plan": _plan(plan), "replayed": False})


def replay_document(workload: str, facts: DeviceFacts, plan: Plan) -> bytes:
    """A stored plan taken in place of a search; its evidence without samples."""
    evidence = plan.evidence
    fields = {
        "baseline": msgspec.to_builtins(evidence.baseline),
        "winner": msgspec.to_builtins(evidence.winner),
        "chosen": [str(spec) for spec in plan.candidate],
        "regime": evidence.regime,
        "candidates": [_trial(trial) for trial in evidence.trials],
        "speedup": msgspec.to_builtins(evidence.speedup),
        "break_even_calls": evidence.break_even_calls,
        "plan": _plan(plan),
        "replayed": True,
    }
    return _document("tune", workload, facts, fields)


def doctor_document(
    facts: DeviceFacts, snapshot: msgspec.Struct, observations: list[Any], noise: Any
) -> bytes:
    """The machine as `steady doctor` found it."""
    fields = {
        "state": msgspec.to_builtins(snapshot),
        "observability": msgspec.to_builtins(observations),
        "noise_floor": msgspec.to_builtins(noise),
    }
    return _document("doctor", "", facts, fields)
