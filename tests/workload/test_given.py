from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import steadytorch as steady
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.workload.given import with_values, workload_of
from steadytorch.workload.workload import Workload

NOWHERE = "cuda:99"
"""A device that no machine has: an error about it means that the workload was accepted."""
FUNCTIONS = {
    "measure": lambda given: steady.measure(given, device=NOWHERE),
    "tune": lambda given: steady.tune(given, device=NOWHERE),
    "explain": lambda given: steady.explain(given, device=NOWHERE),
    "conv": lambda given: steady.conv(given, device=NOWHERE),
    "compare": lambda given: steady.compare(given, given, device=NOWHERE),
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


@pytest.mark.parametrize("kind", [tuple, list])
def test_functions_take_a_model_with_its_inputs(function, kind):
    with pytest.raises(UnsupportedError, match=NOWHERE):
        function(kind((nn.Linear(4, 4).eval(), torch.ones(2, 4))))


def test_functions_say_in_one_line_what_to_pass(function):
    said = (
        "the model Linear alone is not a workload: pass steady.Workload(model, inputs), or the pair"
    )
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        function(nn.Linear(4, 4).eval())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "resnet18",
            "the text 'resnet18' is not a workload: pass steady.load_workload('resnet18')",
        ),
        (torch.ones(2), "a Tensor is not a workload"),
        ((nn.ReLU(),), "a tuple of 1 is not a workload"),
        ((torch.ones(2), nn.ReLU()), "a tuple of 2 is not a workload"),
        (None, "a NoneType is not a workload"),
    ],
)
def test_what_is_no_workload_is_named(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        workload_of(given)


def _meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def _half_meta():
    return nn.Sequential(nn.Linear(4, 4), _meta(nn.Linear(4, 4)))


def _meta_buffer():
    model = nn.BatchNorm1d(4)
    model.running_mean = torch.zeros(4, device="meta")
    return model


def _fake(make):
    with FakeTensorMode():
        return make()


ONES = torch.ones(2, 4)
EMPTY = {
    "meta": (lambda: (_meta(nn.Linear(4, 4)), ONES), "parameter 'weight' is on the meta device"),
    "partly meta": (lambda: (_half_meta(), ONES), "parameter '1.weight' is on the meta device"),
    "buffer": (lambda: (_meta_buffer(), ONES), "buffer 'running_mean' is on the meta device"),
    "input": (lambda: (nn.ReLU(), ONES.to("meta")), "input [0] is on the meta device"),
    "nested input": (
        lambda: (nn.ReLU(), ([ONES, {"mask": ONES.to("meta")}],)),
        "input [0][1]['mask'] is on the meta device",
    ),
    "keyword": (lambda: (nn.ReLU(), {"x": ONES.to("meta")}), "input ['x'] is on the meta device"),
    "fake": (lambda: (_fake(lambda: nn.Linear(4, 4)), ONES), "parameter 'weight' is a fake tensor"),
    "fake input": (
        lambda: (nn.ReLU(), _fake(lambda: torch.ones(2, 4))),
        "input [0] is a fake tensor",
    ),
    "lazy": (lambda: (nn.LazyLinear(4), ONES), "parameter 'weight' is not initialised yet"),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_tensor_without_values_is_named(kind):
    make, said = EMPTY[kind]
    workload = Workload(*make())
    with pytest.raises(UsageError, match=re.escape(f" cannot be run: {said}")) as caught:
        workload_of(workload)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be run"):
        steady.tune(workload)


def test_a_loss_without_values_is_named():
    loss = nn.CrossEntropyLoss(weight=torch.ones(4, device="meta"))
    workload = Workload.training(nn.Linear(4, 4), ONES, loss, torch.optim.SGD)
    with pytest.raises(UsageError, match="loss buffer 'weight' is on the meta device"):
        with_values(workload)


def test_a_workload_with_values_is_itself():
    workload = Workload(nn.BatchNorm1d(4), ([ONES, 3],), {"flag": None})
    assert workload_of(workload) is workload
