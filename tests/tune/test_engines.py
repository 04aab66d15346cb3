from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import steadytorch as steady
from steadytorch.device.facts import DeviceFacts
from steadytorch.plan.store import Store
from steadytorch.process.worker import Fault, WorkerFault
from steadytorch.results.candidate import TransformSpec
from steadytorch.tune import engines
from steadytorch.tune.conv import ConvReport

REPORT = ConvReport((), "", True, 8e14, 4e12, 91900, 1.0)
MODEL = nn.Conv2d(3, 8, 3)
INPUTS = torch.randn(2, 3, 8, 8)


def inference():
    return steady.Workload(MODEL.eval(), INPUTS, name="net")


def training():
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return steady.Workload.training(MODEL, INPUTS, torch.Tensor.sum, sgd, name="net")


@pytest.fixture
def asked(monkeypatch):
    """Fakes a GPU and its report; returns the recorded requests."""
    found = []

    def choose(workload, facts, plans, **arguments):
        found.append((workload, facts, plans, arguments))
        return REPORT

    facts = DeviceFacts(device="cuda", name="GPU", compute_capability="9.0", cudnn="9.19.0")
    monkeypatch.setattr(engines, "resolve_device", lambda request: request)
    monkeypatch.setattr(engines, "load_facts", lambda device: facts)
    monkeypatch.setattr(engines, "choose_and_keep", choose)
    return found


def test_what_is_asked_reaches_the_choice(asked, tmp_path):
    told, half = [], (TransformSpec("channels_last"),)
    found = steady.conv(
        inference(),
        candidate=half,
        budget="90s",
        deterministic=True,
        device="cuda:1",
        store=tmp_path,
        progress=told.append,
    )
    assert found is REPORT
    ((workload, facts, plans, arguments),) = asked
    assert (workload.name, facts.name) == ("net", "GPU")
    assert isinstance(plans, Store)
    assert arguments == {
        "prefix": half,
        "device": "cuda:1",
        "deadline_s": 90.0,
        "deterministic": True,
    }
    assert told == ["choosing cuDNN engines in a worker process"]


def test_a_store_that_is_open_is_used_as_it_is(asked, tmp_path):
    store = Store(tmp_path)
    steady.conv(inference(), device="cuda", store=store)
    assert asked[0][2] is store


def test_without_a_gpu_it_says_what_it_needs():
    with pytest.raises(steady.UnsupportedError, match="needs a CUDA device"):
        steady.conv(inference())


@pytest.mark.usefixtures("asked")
def test_a_budget_that_is_no_time_is_refused():
    with pytest.raises(steady.UsageError, match="'soon' is not a time"):
        steady.conv(inference(), device="cuda", budget="soon")


def test_a_training_step_takes_only_transforms_that_decide_its_engines(asked):
    steady.conv(training(), device="cuda", candidate=(TransformSpec("channels_last"),))
    assert asked[0][0].is_training
    with pytest.raises(
        steady.UsageError, match="inference_mode does not apply to choosing engines"
    ):
        steady.conv(training(), device="cuda", candidate=(TransformSpec("inference_mode"),))
    assert len(asked) == 1


@pytest.mark.usefixtures("asked")
def test_a_worker_that_fails_is_told_in_a_line(monkeypatch):
    def fail(*given, **arguments):
        raise WorkerFault(Fault.RAISED, "the frontend is missing")

    monkeypatch.setattr(engines, "choose_and_keep", fail)
    with pytest.raises(steady.UnsupportedError) as caught:
        steady.conv(inference(), device="cuda")
    assert str(caught.value) == "engines cannot be chosen for net: the frontend is missing"
