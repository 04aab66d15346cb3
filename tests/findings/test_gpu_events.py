from __future__ import annotations

import numpy as np
import pytest

from steadytorch.findings.finding import Abstention, Case
from steadytorch.findings.gpu_events import (
    Named,
    busy_ns,
    exposed_ns,
    gpu_launches,
    longest,
    per_step,
    spent_per_step,
    step_ns,
)
from steadytorch.traces.events import Category

from .cases import MS, US, kernel, memcpy, op, step, traced


@pytest.fixture
def seen():
    events = [step(1, 0, 10 * MS), step(2, 10 * MS, 20 * MS)]
    events += [
        kernel("a", 1 * MS, 3 * MS, correlation=1),
        kernel("b", 4 * MS, 5 * MS, correlation=2),
        kernel("a", 11 * MS, 12 * MS, correlation=3),
        memcpy("Memcpy HtoD", 2 * MS, 3 * MS + 200 * US, correlation=4, stream=20),
    ]
    found = gpu_launches(traced(events), "a rule")
    assert not isinstance(found, Abstention)
    return found


@pytest.mark.parametrize(
    ("case", "recipe"),
    [(Case(), "steady explain"), (traced([op("aten::mm", 0, MS)]), "CUDA")],
)
def test_without_gpu_events_a_rule_abstains(case, recipe):
    verdict = gpu_launches(case, "a rule")
    assert isinstance(verdict, Abstention)
    assert verdict.rule == "a rule"
    assert recipe in verdict.recapture


def test_only_what_no_kernel_covers_is_exposed(seen):
    assert exposed_ns(seen, seen.of(Category.MEMCPY)) == 100 * US


def test_exposed_copies_are_what_the_ledger_says(seen):
    assert exposed_ns(seen, seen.of(Category.MEMCPY)) == seen.ledger.mean("gpu_memcpy")


def test_counts_and_times_are_per_step(seen):
    kernels = seen.of(Category.KERNEL)
    assert per_step(seen, kernels) == 1.5
    assert spent_per_step(seen, kernels) == 2 * MS
    assert step_ns(seen.ledger) == 10 * MS
    assert busy_ns(seen.ledger) == 2 * MS + 100 * US


def test_names_come_with_the_longest_first(seen):
    found = longest(seen, seen.of(Category.KERNEL))
    assert [one.name for one in found] == ["a", "b"]
    assert str(found[0]) == "a: 1 a step, 1.50 ms"


def test_many_events_of_a_name_are_counted_in_full():
    assert str(Named("a", 1600, 1.5 * MS)) == "a: 1600 a step, 1.50 ms"


def test_no_events_have_no_names(seen):
    assert longest(seen, np.zeros(len(seen.rows), dtype=bool)) == []
