from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from steadytorch.findings.finding import Abstention, Case
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rules.graph_break import NAME, rule
from steadytorch.traces.reader import read_trace

from ..findings.cases import MS, op, step, the, traced

REGION = "Torch-Compiled Region: "


def test_counted_breaks_are_told_with_their_reasons_the_most_frequent_first():
    notes = {"graph_breaks": {"a call of print": 2, "Tensor.item()\nmore": 7}}
    found = the(rule(Case(notes=notes)))
    assert found.id == NAME
    assert found.confidence == "high"
    assert found.evidence[0] == "Tensor.item() (7 times)"
    assert the(rule(Case(notes={"graph_breaks": ["print"]}))).evidence == ("print",)


def test_no_break_counted_is_none_whatever_the_regions():
    events = [step(1, 0, MS), op(REGION + "0/0", 0, 900), op(REGION + "1/0", 100, 200)]
    case = traced(events)
    notes: dict[str, object] = {"graph_breaks": {}}
    assert rule(Case(trace=case.trace, ledger=case.ledger, notes=notes)) == ()


def test_functions_compiled_one_by_one_are_no_break():
    events = [step(1, 0, MS), *(op(f"{REGION}{k}/0", 100 * k, 100 * k + 90) for k in range(5))]
    assert rule(traced(events)) == ()


def test_eager_steps_have_no_graph_to_break():
    assert rule(traced([step(1, 0, MS), op("aten::mm", 0, 9)])) == ()


def test_without_names_of_regions_or_a_trace_it_abstains():
    old = [step(1, 0, MS), op("CompiledFunction", 0, 900)]
    assert isinstance(rule(traced(old)), Abstention)
    assert isinstance(rule(Case()), Abstention)


def test_a_break_in_a_real_function_is_seen_in_its_trace(tmp_path: Path):
    def whole(x):
        return (x @ x).relu().sin()

    def broken(x):
        y = (x @ x).relu()
        torch._dynamo.graph_break()
        return y.sin()

    def found(function):
        compiled = torch.compile(function, backend="eager")
        compiled(torch.ones(4, 4))
        with profile(activities=[ProfilerActivity.CPU]) as running:
            compiled(torch.ones(4, 4))
        path = tmp_path / "trace.json"
        running.export_chrome_trace(str(path))
        assert REGION in json.dumps(json.loads(path.read_text()))
        read = read_trace(path)
        return rule(Case(trace=read, ledger=build_ledger(read)))

    torch._dynamo.reset()
    assert found(whole) == ()
    assert "regions are nested" in the(found(broken)).title
