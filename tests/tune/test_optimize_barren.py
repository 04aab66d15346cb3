"""A model without plans in the store runs untouched, and its inputs are not examined."""

from __future__ import annotations

import pytest
import torch
from stored import small_model

from steadytorch.runtime import dispatch, module
from steadytorch.tune import optimize as optimizing
from steadytorch.tune.optimize import NO_PLAN_AT_ALL, optimize

UNTOUCHED = f"untouched: {NO_PLAN_AT_ALL}"


@pytest.fixture
def described(monkeypatch):
    """Counts how often the model was described."""
    found = []
    original = optimizing.workload_fingerprint
    monkeypatch.setattr(
        optimizing, "workload_fingerprint", lambda w: found.append(1) or original(w)
    )
    return found


def test_shapes_that_churn_cost_nothing(tmp_path, described):
    tuned = optimize(small_model(), store=tmp_path)
    for size in range(1, 50):
        tuned(torch.ones(size, 8))
    assert len(described) == 1
    report = tuned.report()
    assert report.calls == {"untouched: no plan for these inputs": 1, UNTOUCHED: 48} or (
        report.calls == {UNTOUCHED: 49}
    )
    assert report.off == NO_PLAN_AT_ALL
    assert len(report.signatures) <= 1


def test_a_plan_that_is_stored_later_is_found(tmp_path, monkeypatch, keep_unmeasured):
    from steadytorch.results.candidate import TransformSpec
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session
    from steadytorch.workload.workload import Workload

    model, x, clock = small_model(), torch.ones(2, 8), [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    tuned = optimize(model, store=tmp_path, canary=False)
    tuned(x)
    session = Session(Workload(model, (x,)), SearchOptions(), "cpu", tmp_path)
    keep_unmeasured(session, (TransformSpec("inference_mode"),))
    tuned(x)
    assert tuned.report().hits == 0
    clock[0] += dispatch.RECONSIDERED_S
    tuned(x)
    assert tuned.report().hits == 1
    tuned(torch.ones(3, 8))  # another signature of a model that has a plan
    assert tuned.report().off is None
    tuned(x)
    assert tuned.report().hits == 2


def test_refresh_and_moves_ask_anew(tmp_path, described):
    model = small_model()
    tuned = optimize(model, store=tmp_path)
    tuned(torch.ones(2, 8))
    for again in (tuned.refresh, tuned.double):
        again()
        assert tuned.report().off is None
        tuned(torch.ones(2, 8, dtype=next(model.parameters()).dtype))
        assert tuned.report().off == NO_PLAN_AT_ALL
    assert len(described) == 2  # an unchanged model is described once


def test_a_second_store_may_have_what_the_first_has_not(tmp_path, monkeypatch):
    monkeypatch.setenv("STEADYTORCH_SECOND_STORE", f"file://{tmp_path}/second")
    tuned = optimize(small_model(), store=tmp_path / "first")
    tuned(torch.ones(2, 8))
    assert tuned.report().off is None
