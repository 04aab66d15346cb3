from __future__ import annotations

import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.lazy_loading import NAME, rule

from ..findings.cases import MS, US, launch, op, overhead, runtime, step, the, traced


def _steps(*loads, marked=True):
    events = [*loads]
    for k in range(4):
        at = 5 * k * MS
        if marked:
            events.append(step(k + 3, at, at + 5 * MS))
        ran = (at + MS, at + 5 * MS)
        events += launch("k", call=(at + 10 * US, at + 900 * US), gpu=ran, correlation=k + 1)
    return events


@pytest.mark.parametrize("name", ["Lazy Function Loading", "Runtime Triggered Module Loading"])
def test_loads_in_steady_steps_are_found(name):
    found = the(rule(traced(_steps(overhead(name, 10 * MS + 20 * US, 10 * MS + 800 * US)))))
    assert found.id == NAME
    assert found.cost_ns == 780 * US // 3
    assert found.confidence == "high"


def test_modules_loaded_by_hand_are_found():
    load = runtime("cuModuleLoadData", 5 * MS + 20 * US, 5 * MS + 800 * US, driver=True)
    assert the(rule(traced(_steps(load)))).recoverable_ns[1] > 200 * US


@pytest.mark.parametrize("name", ["Buffer Flush", "Activity Buffer Request"])
def test_the_profilers_own_overhead_is_none(name):
    assert rule(traced(_steps(overhead(name, 10 * MS + 20 * US, 10 * MS + 800 * US)))) == ()


def test_questions_about_loading_are_no_loading():
    asked = runtime("cuModuleGetLoadingMode", 10 * MS + 20 * US, 10 * MS + 30 * US, driver=True)
    assert rule(traced(_steps(asked))) == ()


def test_the_first_step_may_load():
    assert rule(traced(_steps(overhead("Lazy Function Loading", 20 * US, 800 * US)))) == ()


def test_without_marks_early_loads_may_be_the_warm_up():
    early = overhead("Lazy Function Loading", 20 * US, 800 * US)
    assert isinstance(rule(traced(_steps(early, marked=False))), Abstention)
    late = overhead("Lazy Function Loading", 15 * MS + 20 * US, 15 * MS + 800 * US)
    assert the(rule(traced(_steps(late, marked=False)))).confidence == "low"


def test_without_a_gpu_it_abstains():
    assert isinstance(rule(Case()), Abstention)
    assert isinstance(rule(traced([op("aten::mm", 0, 9)])), Abstention)
