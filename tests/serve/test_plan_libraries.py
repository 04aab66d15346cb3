"""A plan of an engine serves only with the version of the library that it was made with."""

from __future__ import annotations

import re
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from steadytorch.ranks.group import Ranks
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.module import TunedModule
from steadytorch.serve.plan import Plan
from steadytorch.transforms.base import Transform
from steadytorch.transforms.inference_mode import InferenceMode
from steadytorch.tune.optimize import PlanSource
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session, agree_on_plan
from steadytorch.workload.workload import Workload

dist = pytest.importorskip("torch.distributed")


@pytest.fixture
def made(tmp_path, monkeypatch, keep_unmeasured) -> tuple[Plan, nn.Module, torch.Tensor]:
    """A plan whose transform runs on version 1.0 of a library."""
    monkeypatch.setattr(InferenceMode, "libraries", lambda self: {"engine": "1.0"})
    model, x = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    session = Session(Workload(model, x), SearchOptions(), store=tmp_path)
    return keep_unmeasured(session, (TransformSpec("inference_mode"),)), model, x


def look_up(made, folder):
    _, model, x = made
    return Session(Workload(model, x), SearchOptions(), store=folder).look_up()


def test_the_same_version_serves(made, tmp_path):
    plan, model, x = made
    assert plan.libraries == {"engine": "1.0"}
    fast = plan.apply(model)
    fast(x)
    assert fast.report().hits == 1
    assert look_up(made, tmp_path)[0] == plan


def test_another_version_runs_untouched_and_says_so(made, tmp_path, monkeypatch):
    plan, model, x = made
    monkeypatch.setattr(InferenceMode, "libraries", lambda self: {"engine": "2.0"})
    fast = plan.apply(model)
    torch.testing.assert_close(fast(x), model(x))
    assert "was made with engine 1.0, here is 2.0" in str(fast.report())
    assert "was made with engine 1.0" in look_up(made, tmp_path)[1]


def test_a_library_that_is_gone_runs_untouched_and_says_so(made, monkeypatch):
    def gone(self):
        raise PackageNotFoundError("engine")

    plan, model, x = made
    monkeypatch.setattr(InferenceMode, "libraries", gone)
    fast = plan.apply(model)
    fast(x)
    assert "needs engine, which is not installed" in str(fast.report())


def test_a_plan_from_before_this_field_serves(made):
    data = msgspec.to_builtins(made[0])
    del data["libraries"]
    assert msgspec.convert(data, Plan).violation() is None
    assert Transform.libraries(InferenceMode()) == {}


@pytest.mark.parametrize("ask", ["optimize", "tune"])
def test_a_plan_from_another_rank_is_held_to_the_versions_here(made, tmp_path, monkeypatch, ask):
    _, model, x = made
    store, found = dist.HashStore(), {}
    monkeypatch.setattr(Ranks, "next_prefix", lambda self: "agreement")

    def version() -> str:
        return {"rank 1": "2.0"}.get(threading.current_thread().name, "1.0")

    monkeypatch.setattr(InferenceMode, "libraries", lambda self: {"engine": version()})

    def answer(rank: int, folder: Path) -> None:
        ranks, options = Ranks(rank, 2, store, deadline_s=20.0), SearchOptions()
        if ask == "tune":
            plan = agree_on_plan(
                Session(Workload(model, x), options, store=folder), "replay", None, ranks
            )
            found[rank] = len(plan.candidate), str(plan.evidence.not_tried)
        else:
            fast = TunedModule(model, PlanSource(options, "replay", folder, False, ranks=ranks))
            fast(x)
            found[rank] = fast.report().hits, str(fast.report())

    threads = [
        threading.Thread(target=answer, args=(rank, folder), name=f"rank {rank}")
        for rank, folder in enumerate([tmp_path, tmp_path / "other"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1]
    for served, told in found.values():
        assert not served
        assert re.search(r"rank 1: plan \w+ was made with engine 1.0, here is 2.0", told)
