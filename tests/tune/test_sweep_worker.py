from __future__ import annotations

import msgspec
import pytest

from steadytorch.errors import PlanError, UnsupportedError, UsageError
from steadytorch.measure.measurement import summarize
from steadytorch.plan.record import Speedup
from steadytorch.results.sweep import SweepRow
from steadytorch.tune.result import TuneResult
from steadytorch.tune.session import Session
from steadytorch.tune.sweep_worker import SweepHandler

FACTORY = """
import torch
from torch import nn

def small(batch=2):
    return nn.Linear(8, 8).eval(), torch.ones(batch, 8)
"""


@pytest.fixture
def searches(monkeypatch):
    """Makes searches find at once that nothing is faster; counts them."""
    counted = []

    def search(self, watcher=None):
        counted.append(self.options)
        timing = summarize([1000] * 20, "latency")
        return TuneResult(
            baseline=timing,
            winner=timing,
            chosen=(),
            regime="memory-bound",
            candidates=(),
            not_applicable={},
            not_tried={},
            speedup=Speedup(1.0, None, None, "process", "untouched", 9),
            break_even_calls=None,
            reference="float64",
            seconds=1.0,
        )

    monkeypatch.setattr(Session, "search", search)
    return counted


@pytest.fixture
def ask(tmp_path):
    (tmp_path / "small.py").write_text(FACTORY)

    def run(**changed):
        shape = {"batch": 4, "inputs": [], "train": False, "seed": 0}
        options = {
            "objective": "auto",
            "precision": "same",
            "tolerance": None,
            "seed": 0,
            "budget_s": 30.0,
            "max_memory_bytes": None,
        }
        asked = {
            "workload": f"{tmp_path / 'small.py'}:small",
            "shape": shape,
            "options": options,
            "device": "cpu",
            "store": str(tmp_path / "plans"),
            "mode": "replay",
            "bundle": False,
        }
        return SweepHandler(tmp_path).tune(**asked | changed)

    return run


def as_row(found):
    return msgspec.convert({"workload": "w", "status": "done", **found}, SweepRow)


def test_a_search_and_its_replay_make_rows(ask, searches, tmp_path):
    found, again = as_row(ask()), as_row(ask())
    assert len(searches) == 1
    assert (found.replayed, again.replayed) == (False, True)
    assert found.plan == again.plan
    assert found.plan.path.startswith(str(tmp_path / "plans"))
    assert found.speedup.verdict == "untouched"
    assert found.device
    assert found.reason is None


def test_mode_tune_searches_again(ask, searches):
    ask()
    assert not ask(mode="tune")["replayed"]
    assert len(searches) == 2


def test_mode_strict_needs_a_stored_plan(ask, searches):
    with pytest.raises(PlanError, match="no stored plan"):
        ask(mode="strict")
    ask()
    assert ask(mode="strict")["replayed"]


def test_a_plan_that_is_not_stored_says_why(ask, searches, tmp_path):
    (tmp_path / "plans").write_text("not a folder")
    assert "cannot be written" in ask()["unable"]


def test_a_missing_device_is_found_before_any_workload(tmp_path):
    handler = SweepHandler(tmp_path)
    handler.check(device="cpu")
    handler.check(device="auto")
    with pytest.raises(UnsupportedError, match="cuda:99"):
        handler.check(device="cuda:99")
    with pytest.raises(UsageError, match="tpu"):
        handler.check(device="tpu")


def test_a_bundle_that_cannot_be_kept_is_named(ask, searches, monkeypatch):
    monkeypatch.setattr(Session, "keep_bundle", lambda self, plan: "no compiler")
    assert as_row(ask(bundle=True)).reason == "no bundle: no compiler"


def test_an_unknown_workload_is_an_error(ask, searches):
    with pytest.raises(UsageError, match="unknown workload"):
        ask(workload="resnet5")
