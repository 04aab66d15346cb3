from __future__ import annotations

import pytest
import torch

from steadytorch.findings.finding import Abstention, Case
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rules.input_pipeline import NAME, rule
from steadytorch.traces.reader import read_trace
from steadytorch.workload.workload import Workload

from ..findings.cases import MS, US, annotation, kept, launch, op, step, the, traced

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def _steps(wait_ms, name=LOADER, busy_ms=10):
    events = []
    for k in range(4):
        at = k * (busy_ms + wait_ms) * MS
        ready = at + wait_ms * MS
        events.append(step(k + 1, at, ready + busy_ms * MS))
        events.append(annotation(name, at, ready))
        gpu = (ready + 9 * US, ready + busy_ms * MS)
        events += launch("k", call=(ready, ready + 9 * US), gpu=gpu, correlation=k + 1)
    return events


def test_a_gpu_that_waits_for_batches_is_found():
    found = the(rule(traced(_steps(5))))
    assert found.id == NAME
    assert found.slices == ("idle_data_wait",)
    assert 4.5 * MS < found.recoverable_ns[1] < 5.1 * MS
    assert "num_workers" in found.fix


def test_a_loader_with_workers_is_told_something_else():
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    assert "more workers" in the(rule(traced(_steps(5, name)))).fix


def test_a_loader_that_works_while_the_gpu_does_costs_nothing():
    events = [step(1, 0, 10 * MS), annotation(LOADER, 10 * US, 9 * MS)]
    events += launch("k", call=(0, 9 * US), gpu=(9 * US, 10 * MS), correlation=1)
    assert rule(traced(events)) == ()


def test_a_step_on_the_cpu_waits_as_well():
    events = []
    for k in range(3):
        at = 10 * k * MS
        events += [step(k + 1, at, at + 10 * MS), annotation(LOADER, at, at + 5 * MS)]
        events.append(op("aten::mm", at + 5 * MS, at + 10 * MS))
    found = the(rule(traced(events, workload=FED)))
    assert (found.slices, found.transforms) == (("cpu_data_wait",), ())


def test_a_trace_without_any_loader_cannot_tell():
    events = [step(1, 0, 10 * MS), *launch("k", call=(0, 9), gpu=(9, 9 * MS), correlation=1)]
    said = rule(traced(events))
    assert isinstance(said, Abstention)
    assert "record_function" in said.recapture
    assert isinstance(rule(Case()), Abstention)


FED = Workload.from_loader(torch.neg, [torch.ones(1)])


@pytest.mark.parametrize(
    ("workload", "named"),
    [(FED, ("prefetch",)), (Workload(torch.neg, torch.ones(1)), ()), (None, ())],
    ids=["fed", "without a loader", "unknown"],
)
def test_batches_are_taken_ahead_where_the_workload_carries_the_loader(workload, named):
    assert the(rule(traced(_steps(5), workload=workload))).transforms == named


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("h100_owlv2.json.gz", 0.40, 0.55),
        ("kineto_v100_resnet50_workers0.json.gz", 0.32, 0.34),
    ],
)
def test_real_traces_show_it(name, least, most):
    read = read_trace(kept(name))
    ledger = build_ledger(read)
    found = the(rule(Case(trace=read, ledger=ledger)))
    assert least < found.cost_ns * len(ledger.steps) / ledger.total_ns < most
