from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.benchmark_mode import NAME, rule

from ..findings.cases import MS, US, launch, op, runtime, step, the, traced

CONVOLUTION = "aten::cudnn_convolution"
ON, OFF = {"cudnn_benchmark": True}, {"cudnn_benchmark": False}


def _steps(*names, growing=False, kernel_ns=5 * MS):
    """Three steps that run these operators, with convolution kernels of the given length."""
    events, number = [], 0
    for k in range(3):
        at = 100 * k * MS
        events.append(step(k + 3, at, at + 100 * MS))
        for place, name in enumerate(names):
            number += 1
            start = at + 20 * place * MS
            end = start + 19 * MS
            dims = [[8, 3, 32 + (k if growing else 0), 32], [64, 3, 3, 3]]
            events.append(op(name, start, end, dims=dims))
            length = kernel_ns if "convolution" in name else 5 * MS
            gpu = (start + MS, start + MS + length)
            call = (start + US, start + 20 * US)
            events += launch(f"kernel_{name}", call=call, gpu=gpu, correlation=number)
    return events


def test_on_without_convolutions_it_has_nothing_to_choose():
    found = the(rule(traced(_steps("aten::mm"), notes=ON)))
    assert (found.id, found.information) == (NAME, True)
    assert "nothing to choose: cuDNN ran no convolution" in found.title
    assert found.recoverable_ns == (0, 0)


def test_on_with_steps_on_the_cpu_it_has_nothing_to_choose():
    events = [step(1, 0, MS), op("aten::mkldnn_convolution", 0, MS)]
    assert "ran on the CPU" in the(rule(traced(events, notes=ON))).title


def test_what_a_graph_holds_is_not_seen():
    events = [*_steps("aten::mm"), runtime("cudaGraphLaunch", MS, MS + US)]
    assert rule(traced(events, notes=ON)) == ()


@pytest.mark.parametrize("name", [CONVOLUTION, "aten::cudnn_convolution_add_relu"])
def test_on_with_convolutions_there_is_nothing_to_say(name):
    assert rule(traced(_steps(name), notes=ON)) == ()


def test_on_after_convolutions_had_run_it_came_late():
    found = the(rule(traced(_steps(CONVOLUTION), notes=ON | {"cudnn_benchmark_late": True})))
    assert "came late" in found.title
    assert found.information


def test_off_with_convolutions_of_fixed_shapes_it_points_to_their_engines():
    found = the(rule(traced(_steps(CONVOLUTION, "aten::mm"), notes=OFF)))
    assert "default engines: 50 %" in found.title
    assert "steady conv" in found.fix
    assert any("1 convolution shape" in line and "3 steps" in line for line in found.evidence)
    assert (found.information, found.recoverable_ns) == (True, (0, 0))


def test_off_is_right_where_shapes_change():
    assert rule(traced(_steps(CONVOLUTION, growing=True), notes=OFF)) == ()


def test_off_matters_little_where_convolutions_take_little():
    assert rule(traced(_steps(CONVOLUTION, "aten::mm", kernel_ns=100 * US), notes=OFF)) == ()


@pytest.mark.parametrize("names", [("aten::mm",), (CONVOLUTION, "aten::convolution_backward")])
def test_off_without_convolutions_or_in_training_there_is_nothing_to_say(names):
    assert rule(traced(_steps(*names), notes=OFF)) == ()


def test_a_trace_alone_does_not_say_how_the_mode_stood():
    assert isinstance(rule(traced(_steps(CONVOLUTION))), Abstention)
    assert rule(traced(_steps("aten::mm"))) == ()
    assert isinstance(rule(Case()), Abstention)
