"""Captured traces: four steps each on an H200 with PyTorch 2.11, of workloads in `examples/`."""

from pathlib import Path

import pytest

from steadytorch.explain.session import explain

DATA = Path(__file__).parent / "data"
FINDINGS = {
    "h200_launch_bound": ["launch-bound", "layout-conversion"],
    "h200_layout_conversion": ["layout-conversion"],
    "h200_pageable_copy": ["pageable-copy"],
    "h200_synchronisation": ["synchronisation"],
}


@pytest.fixture(scope="module", params=FINDINGS)
def explained(request):
    return request.param, explain(DATA / f"{request.param}.json.gz")


def test_each_shows_its_finding_and_no_other(explained):
    name, found = explained
    assert [f.id for f in found.findings if not f.information] == FINDINGS[name]


def test_each_has_four_marked_steps_that_add_up(explained):
    _, found = explained
    assert (len(found.steps), found.marked) == (4, True)
    for step in found.steps:
        assert sum(step.slices_ns.values()) == step.total_ns


def test_none_has_anything_that_must_not_be_trusted(explained):
    _, found = explained
    assert found.problems == ()
    assert found.gpu.busy_ns + found.gpu.idle_ns == found.gpu.total_ns
    assert found.environment.name == "NVIDIA H200"


# Six steps of four ranks, captured on two cores with PyTorch 2.13 and gloo: operators and ranges.


@pytest.fixture(scope="module")
def of_ranks():
    return {
        name: explain([DATA / f"gloo_{name}_rank{rank}.json.gz" for rank in range(4)])
        for name in ("loader", "clean")
    }


def test_the_rank_with_a_slow_loader_is_late(of_ranks):
    found = of_ranks["loader"]
    (late,) = found.late
    assert (late.rank, late.slice) == (2, "cpu_data_wait")
    assert late.steps == (7, 8, 9, 10, 11, 12)
    assert 10e6 < late.late_ns < 30e6  # it sleeps for 20 ms
    assert found.ranks[2].waiting_ns < 0.1 * min(
        each.waiting_ns for each in found.ranks if each.rank != 2
    )


def test_ranks_that_are_alike_are_not_late(of_ranks):
    assert of_ranks["clean"].findings == of_ranks["clean"].abstained == ()


@pytest.mark.parametrize("name", ["loader", "clean"])
def test_steps_of_ranks_add_up(of_ranks, name):
    for each in of_ranks[name].ranks:
        parts = sum(each.slices_ns.values()) + each.transfer_ns + each.waiting_ns
        assert parts == pytest.approx(each.step_ns)
