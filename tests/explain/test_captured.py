"""Four steps each, captured on an H200 with PyTorch 2.11; the workloads are in `examples/`."""

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
