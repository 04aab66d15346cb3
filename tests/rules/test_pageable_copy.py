from __future__ import annotations

import pytest
import torch

from steadytorch.findings.finding import Abstention, Case
from steadytorch.rules.pageable_copy import NAME, rule
from steadytorch.workload.workload import Workload

from ..findings.cases import MS, US, kernel, memcpy, op, runtime, step, the, traced


def _copy(name="Memcpy HtoD (Pageable -> Device)", size=1 << 20, api="cudaMemcpyAsync"):
    return [
        step(1, 0, 10 * MS),
        runtime(api, 0, 900 * US, correlation=5),
        memcpy(name, 100 * US, 1 * MS, size=size, correlation=5),
        kernel("k", 1 * MS, 9 * MS, correlation=6),
    ]


@pytest.mark.parametrize(
    "name", ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"]
)
def test_a_large_copy_from_or_to_pageable_memory_is_found(name):
    found = the(rule(traced(_copy(name))))
    assert found.id == NAME
    assert found.cost_ns == found.recoverable_ns[1] == 900 * US
    assert found.slices == ("gpu_memcpy",)
    assert found.confidence == "high"
    assert "900 us" in found.evidence[0]


def test_only_time_in_which_no_kernel_runs_counts():
    events = [*_copy(), kernel("other", 0, 800 * US, correlation=7, stream=20)]
    assert the(rule(traced(events))).cost_ns == 200 * US


def test_pinned_memory_is_fine():
    assert rule(traced(_copy("Memcpy HtoD (Pinned -> Device)"))) == ()


def test_a_copy_that_is_staged_without_waiting_is_fine():
    assert rule(traced(_copy(size=64 << 10))) == ()


def test_a_synchronous_call_is_for_another_rule():
    assert rule(traced(_copy(api="cudaMemcpy"))) == ()


def test_costs_are_per_step():
    events = [
        event
        for number in range(4)
        for event in (
            step(number, number * 10 * MS, (number + 1) * 10 * MS),
            memcpy(
                "Memcpy HtoD (Pageable -> Device)",
                number * 10 * MS + MS,
                number * 10 * MS + 3 * MS,
                size=1 << 20,
                correlation=number + 1,
            ),
        )
    ]
    assert the(rule(traced(events))).cost_ns == 2 * MS


def test_a_trace_of_the_cpu_alone_abstains():
    verdict = rule(traced([op("aten::mm", 0, MS)]))
    assert isinstance(verdict, Abstention)
    assert "GPU" in verdict.why


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case()), Abstention)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Memcpy HtoD (Pageable -> Device)", ("prefetch",)),
        ("Memcpy DtoH (Device -> Pageable)", ()),
    ],
)
def test_batches_are_taken_ahead_where_the_workload_carries_the_loader(name, named):
    fed = Workload.from_loader(torch.neg, [torch.ones(1)])
    assert the(rule(traced(_copy(name), workload=fed))).transforms == named
    assert the(rule(traced(_copy(name)))).transforms == ()
