"""Faulty training candidates and one honest one, in real worker processes."""

from types import SimpleNamespace

import psutil
import pytest
import torch
import trained
from torch import nn

from steadytorch import Workload, load_plan, transforms, tune
from steadytorch.bench.bench_worker import save_payload
from steadytorch.process.worker import Worker
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import trial
from steadytorch.tune.reverify import reverify
from steadytorch.tune.search import Search
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session
from steadytorch.tune.setup_scheduler import NullListener, SetupScheduler

pytestmark = pytest.mark.slow  # test_verify_training.py has quick tests of the same faults

HONEST = TransformSpec("trained_as", (("kind", "honest"),))
ENDS = {
    "detached": "gives no gradient to conv.weight",
    "nan_gradient": "the gradient of conv.weight holds NaN",
    "large_gradient": "the gradient of conv.weight is 3 times as large",
    "stale": "the gradient of norm.weight is",
    "coarse_gradient": "gradients: relative error",
    "no_statistics": "buffer norm.running_mean moves 0 times as far",
    "writes_weights": "writes to unused.weight",
}


def _spec(kind):
    return TransformSpec("trained_as", (("kind", kind),))


def _launch(directory):
    return lambda name, imports: Worker("faulty:FaultyHandler", directory, name, {}, None)


@pytest.fixture(scope="module")
def searched(faulty_transforms, tmp_path_factory):
    """One search over all faults and the untouched step under another name."""
    directory = tmp_path_factory.mktemp("search")
    workload, _ = trained.workload()
    before = {name: t.clone() for name, t in workload.model.state_dict().items()}
    save_payload(workload, directory)
    children = set(psutil.Process().children(recursive=True))
    options = SearchOptions(budget_s=600)
    result = Search(
        workload,
        SetupScheduler(_launch(directory), "cpu", transforms.ambient(), options, NullListener()),
        available=[*map(_spec, ENDS), HONEST],
        not_applicable={},
        options=options,
        watcher=NullListener(),
        slots=3,
    ).run()
    return SimpleNamespace(
        result=result,
        left=set(psutil.Process().children(recursive=True)) - children,
        weights=(before, workload.model.state_dict()),
    )


@pytest.mark.parametrize("kind", ENDS)
def test_each_fault_is_rejected_with_its_reason(searched, kind):
    (found,) = [t for t in searched.result.candidates if t.transforms == (_spec(kind),)]
    assert found.status == "rejected"
    assert found.reason.startswith(ENDS[kind])
    assert found.median_ns is None


def test_what_trains_as_it_should_is_timed(searched):
    (found,) = [t for t in searched.result.candidates if t.transforms == (HONEST,)]
    assert found.status == "ok"
    assert found.samples > 0
    assert searched.result.reference.startswith("float64; rounding alone moves gradients by")


def test_no_process_is_left_and_the_callers_weights_are_as_they_were(searched):
    assert not searched.left
    before, after = searched.weights
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def tuned(faulty_transforms, tmp_path_factory):
    """One real tuning of training steps with one option that speeds them up."""
    store = tmp_path_factory.mktemp("store")
    torch.manual_seed(0)
    model = trained.Slow().train()
    workload = Workload.training(
        model, torch.randn(16, 3, 8, 8), trained.Loss(torch.randint(4, (16,))), trained.momentum
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "HANDLER", "faulty:FaultyHandler")
        patch.setattr(Session, "options_that_apply", lambda self: ([_spec("awake")], {}))
        plan = tune(workload, budget="10m", store=store)
    return SimpleNamespace(plan=plan, workload=workload, store=store)


def test_the_plan_of_a_training_workload_is_stored_and_replayed(tuned):
    assert tuned.plan.candidate == (_spec("awake"),)
    assert tuned.plan.evidence.speedup.verdict == "faster"
    assert load_plan(tuned.plan.path) == tuned.plan
    assert tune(tuned.workload, store=tuned.store, mode="strict") == tuned.plan


def test_the_plan_trains_the_model_it_is_applied_to(tuned):
    model = tuned.workload.model
    fast, before = tuned.plan.apply(model), model.head.weight.detach().clone()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    tuned.workload.training_step.loss(fast(*tuned.workload.inputs)).backward()
    optimizer.step()
    assert fast.report().calls == {"tuned": 1}
    assert not torch.equal(model.head.weight, before)


def test_the_plan_is_verified_anew_in_fresh_processes(tuned, monkeypatch):
    monkeypatch.setattr(trial, "HANDLER", "faulty:FaultyHandler")
    found = reverify(tuned.plan, tuned.workload, processes=1)
    assert found.failed is None
    assert found.error is not None


def test_another_loss_is_another_plan(tuned):
    step = tuned.workload
    other = Workload.training(step.model, step.inputs, nn.Identity(), trained.momentum)
    plan, reason = Session(other, SearchOptions(), store=tuned.store).look_up()
    assert plan is None
    assert "workload was" in reason
