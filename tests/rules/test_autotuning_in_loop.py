from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.autotuning_in_loop import NAME, rule

from ..findings.cases import MS, US, launch, op, python, step, the, traced

FORWARD, BACKWARD = "aten::cudnn_convolution", "aten::convolution_backward"


def _steps(tuned, usual=2, name=FORWARD, kinds=10, marked=True):
    """Four steps of three convolutions; `tuned` kernels of `kinds` names in one of each step."""
    events, number = [], 0
    for k in range(4):
        at = 50 * k * MS
        if marked:
            events.append(step(k + 3, at, at + 50 * MS))
        for conv in range(3):
            start = at + 10 * conv * MS
            count = tuned if conv == 1 else usual
            dims = [[8, 3, 32 + k, 32], [64, 3, 3, 3]]
            events.append(op(name, start, start + 9 * MS, dims=dims))
            for run in range(count):
                number += 1
                call = (start + US + run * 100 * US, start + 20 * US + run * 100 * US)
                gpu = (call[1] + US, call[1] + 71 * US)
                algorithm = f"algorithm_{run % kinds}"
                events += launch(algorithm, call=call, gpu=gpu, correlation=number)
    return events


def test_a_convolution_that_runs_many_different_kernels_is_found():
    found = the(rule(traced(_steps(30))))
    assert found.id == NAME
    assert found.cost_ns == pytest.approx(28 * 70 * US)
    assert any("4 different" in line or "3 different" in line for line in found.evidence)


def test_benchmark_mode_that_was_on_makes_it_certain():
    case = traced(_steps(30), notes={"cudnn_benchmark": True})
    found = the(rule(case))
    assert found.confidence == "high"
    assert any("benchmark was on" in line for line in found.evidence)
    assert the(rule(traced(_steps(30)))).confidence == "medium"


def test_the_many_kernels_of_a_usual_backward_are_not_tuning():
    assert rule(traced(_steps(12, usual=8, name=BACKWARD))) == ()


def test_a_loop_over_groups_is_no_tuning():
    assert rule(traced(_steps(64, kinds=2))) == ()


def test_tuning_without_marks_is_told_from_a_warm_up():
    early = [*_steps(30, marked=False)[:70], *_steps(2, marked=False)[70:]]
    assert isinstance(rule(traced(early)), Abstention)


def test_tritons_autotuner_shows_itself_by_name():
    events = _steps(2)
    events.append(python("triton/testing.py(120): do_bench", 110 * MS, 140 * MS))
    found = the(rule(traced(events)))
    assert "Triton" in found.title
    assert found.cost_ns == pytest.approx(30 * MS / 3)


def test_nested_ranges_of_the_autotuner_are_counted_once():
    events = _steps(2)
    for name in ("CachingAutotuner.benchmark_all_configs (dynamo_timed)", "do_bench_gpu"):
        events.append(op(name, 110 * MS, 140 * MS))
    events.append(python("triton/testing.py(120): do_bench", 111 * MS, 139 * MS))
    found = the(rule(traced(events)))
    assert found.cost_ns == pytest.approx(30 * MS / 3)
    assert found.slices == ("idle_compile",)


def test_without_a_gpu_it_abstains():
    assert isinstance(rule(Case()), Abstention)
    assert isinstance(rule(traced([op(FORWARD, 0, 9)])), Abstention)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9))
def test_as_many_kernels_as_a_convolution_can_need_are_never_tuning(one, others, kinds):
    assert rule(traced(_steps(one, usual=others, kinds=kinds))) == ()
