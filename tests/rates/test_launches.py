from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from steadytorch.ledger.ledger import build_ledger
from steadytorch.rates.launches import launches_of, operators_of
from steadytorch.traces.events import Category

from ..traces import generated
from ..traces.published import needs_published
from ..traces.published import trace as published
from ..traces.synthetic import kernel, launch, memcpy, op, runtime, step, trace

MM = {"dims": [[8, 16], [16, 4]], "types": ["float", "float"]}
EVENTS = [
    step(0, 0, 1000),
    op("aten::linear", 10, 400, dims=[[8, 16], [4, 16], []], types=["float", "float", ""]),
    op("aten::t", 20, 60),
    op("aten::mm", 100, 300, **MM),
    op("aten::empty", 110, 130),
    *launch("sgemm", call=(200, 220), gpu=(400, 700), correlation=7),
    op("aten::add", 500, 600, thread=9, dims=[[4], [4]], types=["float", "float"]),
    *launch("add", call=(510, 520), gpu=(700, 800), correlation=8, thread=9),
    kernel("orphan", 800, 900, correlation=99),
]


def _seen(events=EVENTS):
    read = trace(list(events))
    return read, launches_of(read, build_ledger(read))


def _names(read, rows):
    return [read.name_of(row) if row >= 0 else None for row in rows.tolist()]


def test_a_kernel_is_joined_with_its_call_and_the_innermost_operator():
    read, seen = _seen()
    assert _names(read, seen.rows) == ["sgemm", "add", "orphan"]
    assert _names(read, seen.call) == ["cudaLaunchKernel", "cudaLaunchKernel", None]
    assert _names(read, seen.operator) == ["aten::mm", "aten::add", None]


def test_operators_know_who_called_them():
    read, _ = _seen()
    parent = operators_of(read).parent
    callers = {read.name_of(row): above for row, above in enumerate(_names(read, parent))}
    assert callers["aten::mm"] == "aten::linear"
    assert callers["aten::empty"] == "aten::mm"
    assert callers["aten::linear"] is None
    assert callers["aten::add"] is None


def test_a_wrapper_leaves_the_work_to_the_operator_it_calls():
    read, _ = _seen()
    charged = operators_of(read).charged
    owner = {read.name_of(row): above for row, above in enumerate(_names(read, charged))}
    assert owner["aten::mm"] == "aten::mm"
    assert owner["aten::empty"] == "aten::mm"
    assert owner["aten::linear"] is None
    assert owner["aten::t"] is None


def test_a_wrapper_that_calls_nothing_known_does_the_work_itself():
    read, _ = _seen([event for event in EVENTS if event.name != "aten::mm"])
    charged = operators_of(read).charged
    owner = {read.name_of(row): above for row, above in enumerate(_names(read, charged))}
    assert owner["aten::empty"] == "aten::linear"


def test_work_of_operators_that_others_call_is_part_of_theirs():
    given = {"dims": [[4096]], "types": ["float"]}
    read, _ = _seen(
        [
            step(0, 0, 1000),
            op("aten::hardtanh", 10, 400, **given),
            op("aten::clamp", 20, 390, **given),
            op("aten::clamp_min", 30, 300, **given),
            op("aten::empty", 40, 50),
        ]
    )
    charged = operators_of(read).charged
    owner = {read.name_of(row): above for row, above in enumerate(_names(read, charged))}
    called = ("aten::hardtanh", "aten::clamp", "aten::clamp_min", "aten::empty")
    assert {owner[name] for name in called} == {"aten::hardtanh"}


def test_time_of_an_operator_is_without_those_it_calls():
    read, _ = _seen()
    own = {read.name_of(row): ns for row, ns in enumerate(operators_of(read).own_ns().tolist())}
    assert own["aten::linear"] == 390 - 40 - 200
    assert own["aten::mm"] == 180


def test_events_outside_of_the_steps_are_left_out():
    late = launch("late", call=(2000, 2010), gpu=(2100, 2200), correlation=20)
    read, seen = _seen([*EVENTS, *late])
    assert "late" not in _names(read, seen.rows)
    assert seen.steps == 1


def test_masks_by_category_name_and_call():
    copy = memcpy("Memcpy HtoD", 900, 950, correlation=30)
    _, seen = _seen([*EVENTS, runtime("cudaMemcpyAsync", 700, 710, correlation=30), copy])
    assert seen.of(Category.MEMCPY).tolist() == [False, False, False, True]
    assert seen.named(lambda name: "gemm" in name).tolist() == [True, False, False, False]
    assert seen.called(lambda name: "Memcpy" in name).tolist() == [False, False, False, True]


def test_calls_of_whole_microseconds_belong_to_the_operator_around_their_middle():
    """Two operators of an old trace that touch, and a call that touches both ends."""
    events = [
        op("aten::mm", 0, 10_000, **MM),
        op("aten::add", 10_000, 20_000),
        *launch("sgemm", call=(4_000, 10_000), gpu=(30_000, 40_000), correlation=1),
        *launch("add", call=(10_000, 20_000), gpu=(40_000, 50_000), correlation=2),
    ]
    read = trace(events, "2021")
    seen = launches_of(read, build_ledger(read))
    assert _names(read, seen.operator) == ["aten::mm", "aten::add"]


@given(generated.traces())
def test_joins_hold_on_any_trace(events):
    read = trace(events)
    operators = operators_of(read)
    has = operators.parent >= 0
    assert (operators.parent[has] < np.flatnonzero(has)).all()
    assert operators.own_ns().min(initial=0) >= 0
    ledger = build_ledger(read)
    if ledger.kind == "gpu":
        seen = launches_of(read, ledger)
        known = seen.call >= 0
        events = read.events
        same = events.correlation[seen.call[known]] == events.correlation[seen.rows[known]]
        assert same.all()


@needs_published
@pytest.mark.parametrize("name", ["h100_bert_small", "h100_owlv2", "kineto_v100_resnet50_workers0"])
def test_published_kernels_are_joined_by_their_external_ids_too(name):
    """The profiler's external ids are an independent link to operators."""
    read = published(name)
    seen = launches_of(read, build_ledger(read))
    assert (seen.operator >= 0).all()
    external = read.events.external
    agree = external[seen.operator] == external[seen.rows]
    assert agree.mean() > 0.999
