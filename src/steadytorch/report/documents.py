"""Results as the JSON objects that `--json` writes."""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING, Any

import msgspec

from steadytorch.device.facts import DeviceFacts
from steadytorch.report.measure import representative
from steadytorch.results.saved import SCHEMA

if TYPE_CHECKING:
    from steadytorch.explain.result import Explanation
    from steadytorch.plan.plan import Plan
    from steadytorch.plan.record import Trial
    from steadytorch.trial.measure import MeasureResult
    from steadytorch.tune.conv import ConvReport
    from steadytorch.tune.result import TuneResult

_SURROGATES = re.compile("[\ud800-\udfff]")


def _document(kind: str, workload: str, facts: DeviceFacts, fields: dict[str, Any]) -> bytes:
    head = {
        "schema": SCHEMA,
        "kind": kind,
        "workload": workload,
        "environment": msgspec.to_builtins(facts),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    document = {**head, **fields}
    try:
        encoded = msgspec.json.encode(document)
    except UnicodeEncodeError:  # the name of a file may be no UTF-8
        encoded = msgspec.json.encode(_encodable(document))
    return msgspec.json.format(encoded, indent=1) + b"\n"


def _encodable(value: Any) -> Any:
    """The same with U+FFFD for what stands for no character, such as a byte that is no UTF-8."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def _trial(trial: Trial) -> dict[str, Any]:
    return {**msgspec.to_builtins(trial), "transforms": [str(spec) for spec in trial.transforms]}


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "id": plan.id,
        "path": plan.path,
        "transforms": [str(spec) for spec in plan.candidate],
        "objective": plan.key.objective,
    }


def tune_document(
    workload: str,
    facts: DeviceFacts,
    result: TuneResult,
    plan: Plan | None,
    *,
    inputs: str,
    trains: bool,
) -> bytes:
    """A search, with all samples; `plan` is None where the search was cut short.

    `inputs` are those searched for, as people read them; `trains` says whether it was for a
    training step.
    """
    fields = msgspec.to_builtins(result)
    fields["candidates"] = [_trial(trial) for trial in result.candidates]
    fields["chosen"] = [str(spec) for spec in result.chosen]
    fields |= {"inputs": inputs, "trains": trains, "plan": _plan(plan), "replayed": False}
    return _document("tune", workload, facts, fields)


def replay_document(workload: str, facts: DeviceFacts, plan: Plan) -> bytes:
    """A stored plan taken in place of a search; its evidence without samples."""
    evidence = plan.evidence
    fields = {
        "baseline": msgspec.to_builtins(evidence.baseline),
        "winner": msgspec.to_builtins(evidence.winner),
        "chosen": [str(spec) for spec in plan.candidate],
        "regime": evidence.regime,
        "candidates": [_trial(trial) for trial in evidence.trials],
        "not_applicable": evidence.not_applicable,
        "not_tried": evidence.not_tried,
        "speedup": msgspec.to_builtins(evidence.speedup),
        "break_even_calls": evidence.break_even_calls,
        "reference": evidence.reference,
        "seconds": evidence.search_s,
        "interrupted": False,
        "inputs": plan.key.signature,
        "trains": plan.trains is not None,
        "plan": _plan(plan),
        "replayed": True,
    }
    return _document("tune", workload, facts, fields)


def conv_document(workload: str, facts: DeviceFacts, report: ConvReport) -> bytes:
    """Every distinct convolution, its pass, all its engines, and whether the chosen repeats."""
    fields = msgspec.to_builtins(report)
    for shown, layer in zip(fields["layers"], report.layers, strict=True):
        shown["pass"] = layer.operation
        shown["deterministic"] = layer.deterministic
    return _document("conv", workload, facts, fields)


def measure_document(workload: str, facts: DeviceFacts, result: MeasureResult) -> bytes:
    """A measurement, all samples of all processes included.

    The fields at the top are those of the process whose median is the middle one, but for the
    median and its interval, the samples and the outliers: these are of all processes.
    """
    shown = representative(result)
    fields = msgspec.to_builtins(shown.period)
    fields |= {
        "median_ns": result.median_ns,
        "median_ci_ns": result.median_ci_ns,
        "samples_ns": [t for process in result.processes for t in process.period.samples_ns],
        "outliers": _all_outliers(result),
        "host": msgspec.to_builtins(shown.host),
        "device": msgspec.to_builtins(shown.device),
        "unknown": shown.unknown,
        "claim": result.claim,
        "spread": result.spread,
        "failed": result.failed,
        "interrupted": result.interrupted,
        "processes": msgspec.to_builtins(result.processes),
    }
    if result.median_ci_ns is not None:
        fields["why_no_ci"] = None
    elif len(result.replicates) > 1:
        fields["why_no_ci"] = "an interval over processes needs three of them"
    return _document("measure", workload, facts, fields)


def _all_outliers(result: MeasureResult) -> list[dict[str, Any]]:
    """Those of all processes, with their places among the samples of all."""
    found, before = [], 0
    for process in result.processes:
        for outlier in process.period.outliers:
            found.append({**msgspec.to_builtins(outlier), "index": before + outlier.index})
        before += len(process.period.samples_ns)
    return found


def explain_document(workload: str, result: Explanation) -> bytes:
    """An explanation, all findings and abstentions included; of a workload or a trace file."""
    return _document("explain", workload, result.environment, msgspec.to_builtins(result))
