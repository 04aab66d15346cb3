from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.launch_bound import NAME, rule
from steadytorch.workload.workload import Workload

from ..findings.cases import MS, US, annotation, launch, op, step, the, traced


def _loop(count=20, kernel_ns=5 * US, every_ns=40 * US):
    """Kernels that begin as soon as they are launched, at this distance."""
    events = [step(1, 0, count * every_ns + MS // 10)]
    for at in range(count):
        begin = at * every_ns
        events += [op("aten::add", begin, begin + every_ns)]
        events += launch(
            "k",
            call=(begin + 20 * US, begin + 25 * US),
            gpu=(begin + 25 * US, begin + 25 * US + kernel_ns),
            correlation=at + 1,
        )
    return events


def _measured(period_ns):
    return SimpleNamespace(period=SimpleNamespace(median_ns=period_ns))


def test_short_kernels_with_gaps_are_found():
    found = the(rule(traced(_loop())))
    assert found.id == NAME
    assert found.confidence == "high"
    assert found.recoverable_ns[1] == found.cost_ns > 600 * US
    assert "20 kernels a step, 5.00 us each" in found.evidence[0]
    assert "cuda_graph" in found.transforms


def test_kernels_one_after_another_are_not():
    assert rule(traced(_loop(kernel_ns=39 * US))) == ()


def test_a_handful_of_kernels_says_nothing():
    assert rule(traced(_loop(count=4))) == ()


@pytest.mark.parametrize(("kernel_ns", "found"), [(33 * US, False), (15 * US, True)])
def test_long_kernels_are_found_only_where_much_is_idle(kernel_ns, found):
    verdict = rule(traced(_loop(kernel_ns=kernel_ns)))
    assert bool(verdict) is found


def test_idle_time_that_only_the_profiler_causes_is_not_claimed():
    assert rule(traced(_loop(), measured=_measured(105 * US))) == ()


def test_no_more_is_claimed_than_is_idle_without_the_profiler():
    found = the(rule(traced(_loop(), measured=_measured(300 * US))))
    assert found.recoverable_ns == (0, 200 * US)
    assert found.cost_ns > 600 * US


def test_training_steps_are_not_offered_a_graph():
    model = torch.nn.Linear(2, 2)
    workload = Workload.training(
        model, torch.ones(1, 2), torch.sum, lambda p: torch.optim.SGD(p, lr=0.1)
    )
    assert the(rule(traced(_loop(), workload=workload))).transforms == ("compile",)


@pytest.mark.parametrize(
    "event",
    [
        annotation("Optimizer.step#SGD.step", 800 * US, 810 * US),
        op("autograd::engine::evaluate_function: AddmmBackward0", 800 * US, 810 * US),
    ],
)
def test_traces_of_training_are_not_offered_a_graph(event):
    assert the(rule(traced([*_loop(), event]))).transforms == ("compile",)


def test_a_trace_of_the_cpu_alone_abstains():
    assert isinstance(rule(traced([op("aten::mm", 0, MS)])), Abstention)


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case()), Abstention)
