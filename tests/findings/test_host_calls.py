from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.host_calls import callers, owned_ns, spent_ns, steady, steps_of, tally
from steadytorch.ledger.ledger import build_ledger
from steadytorch.traces.events import Category
from steadytorch.traces.evidence import by_name
from steadytorch.traces.steps import CALLS

from .cases import MS, US, annotation, launch, op, runtime, step, trace, traced


def _steps(*calls, count=3, first=4):
    marks = [step(first + k, k * 10 * MS, (k + 1) * 10 * MS) for k in range(count)]
    work = [
        event
        for k in range(count)
        for event in launch(
            "k",
            call=(k * 10 * MS, k * 10 * MS + 9 * US),
            gpu=(k * 10 * MS + 9 * US, k * 10 * MS + 9 * MS),
            correlation=100 + k,
        )
    ]
    return [*marks, *work, *calls]


def _calls(read):
    return by_name(read, CALLS, "cudaMalloc")


def test_the_first_of_several_steps_may_still_warm_up():
    read = trace(_steps(*(runtime("cudaMalloc", at * MS, at * MS + 5) for at in (3, 13, 14, 23))))
    late = steady(read, build_ledger(read), _calls(read))
    assert (len(late.rows), late.steps, late.hit, late.early, late.sure) == (3, 2, 2, 1, True)


def test_a_lone_step_counts_unless_it_is_the_first_of_its_run():
    call = runtime("cudaMalloc", 3 * MS, 3 * MS + 5)
    for first, found in ((5, 1), (0, 0)):
        read = trace(_steps(call, count=1, first=first))
        assert len(steady(read, build_ledger(read), _calls(read)).rows) == found


def test_without_marks_the_second_half_stands_for_steady_steps():
    read = trace(_steps(*(runtime("cudaMalloc", at * MS, at * MS + 5) for at in (3, 27)))[3:])
    late = steady(read, build_ledger(read), _calls(read))
    assert (len(late.rows), late.early, late.sure) == (1, 1, False)


def test_moments_outside_of_all_steps_belong_to_none():
    ledger = build_ledger(trace(_steps()))
    moments = np.array([-5, 0, 15 * MS, 29 * MS, 99 * MS])
    assert steps_of(ledger, moments).tolist() == [-1, 0, 1, 2, -1]


def test_a_call_is_named_by_the_operator_around_it():
    read = trace(
        [
            step(0, 0, 9 * MS),
            annotation("mine", 1, 8 * MS),
            op("aten::item", 2, 5 * MS),
            op("aten::_local_scalar_dense", 3, 4 * MS),
            runtime("cudaStreamSynchronize", 4, 3 * MS),
            runtime("cudaMalloc", 6 * MS, 7 * MS),
            runtime("cudaFree", 8 * MS + 1, 9 * MS),
        ]
    )
    rows = by_name(read, CALLS, ".*")
    found = {
        read.name_of(int(row)): name for row, name in zip(rows, callers(read, rows), strict=True)
    }
    assert found == {
        "cudaStreamSynchronize": "aten::item",
        "cudaMalloc": "mine",
        "cudaFree": "cudaFree",
    }


def test_an_operator_that_waits_by_itself_is_no_caller_of_its_own():
    read = trace([annotation("mine", 0, 9), op("aten::item", 1, 8), op("aten::item", 10, 12)])
    rows = by_name(read, (Category.CPU_OP,), ".*")
    assert callers(read, rows) == ["mine", "aten::item"]
    assert callers(read, rows[:0]) == []


def test_marks_of_steps_are_no_callers_however_they_were_recorded():
    for mark in (op, annotation):
        read = trace([mark("ProfilerStep#3", 0, 9), runtime("cudaStreamSynchronize", 1, 3)])
        assert callers(read, by_name(read, CALLS, ".*")) == ["cudaStreamSynchronize"]


def test_operators_of_other_threads_are_no_callers():
    other = op("aten::item", 0, 9, thread=7)
    read = trace([other, runtime("cudaStreamSynchronize", 1, 3)])
    assert callers(read, by_name(read, CALLS, ".*")) == ["cudaStreamSynchronize"]


def test_names_are_counted_the_most_frequent_first():
    calls = [runtime(f"cuda{name}", k * US, k * US + 10) for k, name in enumerate("abbbccd")]
    read = trace(calls)
    listed = tally(read, by_name(read, CALLS, ".*"))
    assert listed == "cudab (3), cudac (2), cudaa (1), ..."


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=30))
def test_nested_and_repeated_calls_are_counted_once(spans):
    """Compare with the set of all covered microseconds."""
    read = trace(
        [runtime("x", a * US, (a + length) * US) for a, length in [(0, 1), *spans]], flows=False
    )
    rows = np.arange(len(read.events))
    covered = {at for a, length in [(0, 1), *spans] for at in range(a, a + length)}
    assert spent_ns(read, rows) == len(covered) * US


def test_what_rows_own_is_part_of_the_slice():
    malloc = runtime("cudaMalloc", 9 * MS + 100 * US, 9 * MS + 900 * US)
    case = traced(_steps(malloc))
    rows = _calls(case.trace)
    owned = owned_ns(case.trace, case.ledger, "idle_allocation", rows)
    assert owned == case.ledger.total("idle_allocation") > 500 * US
    assert owned_ns(case.trace, case.ledger, "cpu_allocation", rows) == 0
