"""A real job of four ranks under torchrun, profiled, with and without a late rank."""

from __future__ import annotations

import importlib
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="PyTorch has no torch.distributed"),
]


CROWDED = 0.25
"""Share of all cores' time from which other programs make ranks late in earnest."""


@pytest.fixture
def run_once(monkeypatch, tmp_path):
    taken = psutil.cpu_percent(interval=1) / 100
    if taken > CROWDED:
        pytest.skip(f"other programs take {taken:.0%} of the cores, so ranks are late in earnest")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return lambda kind: importlib.import_module("stragglers").run_once(kind, tmp_path)


@pytest.mark.parametrize("kind", ["sleep", "loader"])
def test_the_late_rank_is_named_with_its_slice(run_once, kind):
    found = run_once(kind)
    assert found["right"], found


def test_none_is_named_without_one(run_once):
    found = run_once("clean")
    assert found["late"] == [], found
