from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.findings.finding import Abstention, Case
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rules.bias_before_batch_norm import NAME, rule

from ..findings.cases import MS, US, launch, op, step, the, traced
from ..traces.profiled import trace_of

IMAGE = torch.randn(2, 3, 8, 8)


def _case(model, train):
    model.train(train)
    read = trace_of(lambda: model(IMAGE))
    return Case(trace=read, ledger=build_ledger(read))


@pytest.mark.parametrize("train", [True, False])
def test_a_bias_in_front_of_a_batch_norm_is_found(train):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    found = the(rule(_case(model, train)))
    assert found.id == NAME
    assert found.title.endswith(": 1 a step")  # without a cost, which no operator shows
    assert found.transforms == (() if train else ("fold_batch_norm",))
    assert "[2, 3, 8, 8] and [4, 3, 3, 3]" in found.evidence[0]


def test_what_runs_outside_of_the_steps_is_not_counted():
    inputs = {"dims": [[2, 3, 8, 8], [4, 3, 3, 3], [4]], "types": ["float"] * 3}
    norm = {"dims": [[2, 4, 6, 6], [4], [4]], "types": ["float"] * 3}
    settling = [
        op("aten::conv2d", 20 * MS, 21 * MS, **inputs),
        op("aten::batch_norm", 22 * MS, 23 * MS, **norm),
    ]
    assert ": 1 a step" in the(rule(traced([*_on_gpu(**inputs), *settling]))).title


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()),
    ],
    ids=["no bias", "something between", "the other way round", "no norm", "no convolution"],
)
@pytest.mark.parametrize("train", [True, False])
def test_other_neighbours_are_not(model, train):
    assert rule(_case(model, train)) == ()


def test_a_transposed_convolution_is_found_too():
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4))
    assert the(rule(_case(model, False)))


def _on_gpu(**inputs):
    norm = {"dims": [[2, 4, 6, 6], [4], [4]], "types": ["float"] * 3} if inputs else {}
    return [
        step(1, 0, 10 * MS),
        op("aten::conv2d", 0, 100 * US, **inputs),
        op("aten::cudnn_convolution", 10 * US, 40 * US),
        *launch("conv", call=(20 * US, 25 * US), gpu=(MS, 2 * MS), correlation=1),
        op("aten::add_", 50 * US, 80 * US),
        *launch("add", call=(60 * US, 65 * US), gpu=(2 * MS, 2 * MS + 70 * US), correlation=2),
        op("aten::batch_norm", 110 * US, 200 * US, **norm),
        *launch("bn", call=(120 * US, 130 * US), gpu=(3 * MS, 4 * MS), correlation=3),
    ]


def test_the_cost_is_that_of_the_kernels_that_add_the_bias():
    inputs = {"dims": [[2, 3, 8, 8], [4, 3, 3, 3], [4]], "types": ["float"] * 3}
    found = the(rule(traced(_on_gpu(**inputs))))
    assert found.cost_ns == found.recoverable_ns[1] == 70 * US
    assert found.confidence == "high"


def test_without_shapes_it_abstains_with_a_recipe():
    verdict = rule(traced(_on_gpu()))
    assert isinstance(verdict, Abstention)
    assert "record_shapes" in verdict.recapture


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case()), Abstention)
