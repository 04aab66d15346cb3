"""The reduced form of the soak among the benchmarks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def found():
    spec = importlib.util.spec_from_file_location("soak", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.soak(calls=20_000, shapes=200, threads=4)


def test_results_are_those_of_the_untouched_model(found):
    assert found["wrong"] == []
    assert found["calls"] == 20_000


def test_every_call_is_counted_and_both_kinds_of_plans_served(found):
    assert sum(found["report"].values()) == 20_200
    assert set(found["report"]) == {"tuned", "untouched: no plan for these inputs"}
    assert found["report"]["tuned"] > 10_000


def test_memory_is_flat(found):
    assert found["is_flat"], found["memory_bytes"]
