from __future__ import annotations

import logging

import pytest
import torch
from stored import equal, make_plan, store_plan
from torch import nn

from steadytorch.errors import PlanError, UsageError
from steadytorch.runtime import settings
from steadytorch.runtime.module import TunedModule
from steadytorch.tune import optimize as module_under_test
from steadytorch.tune.optimize import TRAINING, optimize

NO_PLAN = "untouched: no plan for these inputs"


# -- modes --------------------------------------------------------------------------------------


def test_a_stored_plan_is_replayed_for_its_signature_and_no_other(model, x, store):
    tuned = optimize(model, store=store, canary=False)
    assert isinstance(tuned, TunedModule)
    for _ in range(3):
        assert equal(tuned, model, x)
        assert equal(tuned, model, x[:1])
    assert tuned.report().calls == {"tuned": 3, NO_PLAN: 3}


def test_the_report_names_the_plan_and_sets_the_gain_against_the_break_even(model, x, store):
    tuned = optimize(model, store=store, canary=False)
    for _ in range(2):
        tuned(x)
    (served,) = tuned.report().signatures
    assert (served.executor, served.plan) == ("inference_mode", make_plan(model, x).id)
    assert served.saved_ns == 2e6
    assert "paid back after 3 calls" in str(tuned.report())
    tuned(x)
    assert "set-up paid back" in str(tuned.report())


def test_the_gain_so_far_goes_on_after_a_refresh(model, x, store):
    tuned = optimize(model, store=store, canary=False)
    for _ in range(50):
        tuned(x)
    tuned.refresh()
    tuned(x)
    report = tuned.report()
    assert (report.hits, report.saved_s) == (51, pytest.approx(0.051))
    tuned.close()
    assert (tuned.report().hits, tuned.report().saved_s) == (51, pytest.approx(0.051))


def test_a_miss_is_logged_once_with_the_fields_that_differ(model, x, tmp_path, caplog):
    plan = make_plan(model, x, objective="p99")
    tuned = optimize(model, store=store_plan(tmp_path, plan), canary=False)
    for _ in range(3):
        tuned(x)
    assert tuned.report().calls == {NO_PLAN: 3}
    assert caplog.text.count("objective was p99, is latency") == 1


def test_a_plan_to_leave_it_untouched_does_so(model, x, tmp_path):
    tuned = optimize(model, store=store_plan(tmp_path, make_plan(model, x, ())))
    tuned(x)
    assert tuned.report().calls == {"untouched: nothing was faster than the untouched model": 1}


def test_strict_raises_on_a_miss_each_time_and_serves_a_hit(model, x, store):
    tuned = optimize(model, "strict", store=store, canary=False)
    assert equal(tuned, model, x)
    for _ in range(2):
        with pytest.raises(PlanError, match="no stored plan for Sequential"):
            tuned(x[:1])
    assert tuned.report().hits == 1


def test_off_is_always_untouched(model, x, store):
    tuned = optimize(model, "off", store=store)
    assert equal(tuned, model, x)
    assert tuned.report().calls == {"untouched: mode is off": 1}


def test_an_unknown_mode_of_the_process_is_told_once(monkeypatch, caplog):
    settings._warn_of.cache_clear()
    monkeypatch.setenv("STEADYTORCH_MODE", "of")
    with caplog.at_level(logging.WARNING):
        assert [settings.is_switched_off() for _ in range(2)] == [False, False]
    assert caplog.messages == ["STEADYTORCH_MODE=of does nothing: set it to off"]


@pytest.mark.parametrize("value", ["off", " OFF "])
@pytest.mark.parametrize("how", ["optimize", "strict", "apply"])
def test_the_environment_switches_everything_off(model, x, store, monkeypatch, value, how):
    monkeypatch.setenv("STEADYTORCH_MODE", value)
    plan = make_plan(model, x)
    mode = "strict" if how == "strict" else "replay"
    tuned = plan.apply(model) if how == "apply" else optimize(model, mode, store=store)
    assert equal(tuned, model, x)
    assert equal(tuned, model, x[:1])
    tuned.refresh()
    tuned(x)
    assert tuned.report().calls == {"untouched: STEADYTORCH_MODE is off": 3}


# -- buckets ------------------------------------------------------------------------------------


def test_shapes_in_between_are_served_by_the_plan_of_their_bucket(model, tmp_path):
    store_plan(tmp_path, make_plan(model, torch.randn(8, 8)))
    tuned = optimize(model, store=tmp_path, buckets={"batch": [8]}, canary=False)
    for size in (3, 8, 5, 3):
        x = torch.randn(size, 8)
        with torch.no_grad():
            torch.testing.assert_close(tuned(x), model(x))
    assert tuned.report().calls == {"tuned": 4}


def test_what_fits_no_bucket_and_what_has_no_plan_run_untouched(model, tmp_path):
    store_plan(tmp_path, make_plan(model, torch.randn(8, 8)))
    tuned = optimize(model, store=tmp_path, buckets={"batch": [4, 8]}, canary=False)
    for size in (3, 9):
        x = torch.randn(size, 8)
        assert equal(tuned, model, x)
    assert tuned.report().hits == 0
    assert NO_PLAN in tuned.report().calls


# -- misuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"budget": "soon"}, "soon"),
        ({"max_memory": "much"}, "much"),
        ({"objective": "glory"}, "glory"),
        ({"precision": "fp8"}, "fp8"),
        ({"tolerance": 0.1}, "lower precision"),
        ({"buckets": {"batch": []}}, "batch"),
    ],
)
def test_a_wrong_argument_is_named(model, arguments, hint):
    with pytest.raises(UsageError, match=hint):
        optimize(model, **arguments)


@pytest.mark.parametrize("thing", [None, 3, "resnet50"])
def test_what_cannot_be_called_is_a_misuse_that_is_named(thing):
    with pytest.raises(UsageError, match=f"{type(thing).__name__} is not a model"):
        optimize(thing)


@pytest.mark.parametrize("mode", ["replay", "tune", "off"])
def test_a_function_runs_untouched_and_it_is_said_why(model, x, tmp_path, mode):
    tuned = optimize(lambda x, scale=1: scale * model(x), mode, store=tmp_path)
    for _ in range(2):
        torch.testing.assert_close(tuned(x, scale=2), 2 * model(x), rtol=0, atol=0)
    (reason,) = tuned.report().calls
    assert ("not an nn.Module" if mode != "off" else "mode is off") in reason
    with pytest.raises(UsageError, match="mode strict cannot serve a function"):
        optimize(lambda x: x, "strict", store=tmp_path)


def test_a_tuned_module_is_not_tuned_again(model):
    with pytest.raises(UsageError, match="untouched model"):
        optimize(optimize(model))


def test_a_model_in_training_mode_runs_untouched(x, tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout())
    tuned = optimize(model, store=tmp_path)
    torch.manual_seed(1)
    found = tuned(x)
    torch.manual_seed(1)
    assert torch.equal(found, model(x))
    assert found.requires_grad
    assert tuned.report().calls == {f"untouched: {TRAINING}": 1}


def test_a_resolver_that_breaks_leaves_the_model_untouched(model, x, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no")

    monkeypatch.setattr(module_under_test, "Session", broken)
    tuned = optimize(model, store=tmp_path)
    assert equal(tuned, model, x)


def test_inputs_in_the_place_of_the_mode_are_told_from_a_mode():
    with pytest.raises(UsageError, match=r"got a Tensor: .* optimize\(model\)\(inputs\)") as caught:
        optimize(nn.Linear(4, 4), torch.ones(300, 4))
    assert "\n" not in str(caught.value)
