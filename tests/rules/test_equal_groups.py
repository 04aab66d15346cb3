from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.findings.finding import Abstention
from steadytorch.rules.equal_groups import FEWEST, NAME, rule
from steadytorch.workload.workload import Workload

from ..findings.cases import MS, US, annotation, launch, op, step, the, traced

GROUPS = 6


def _trained(groups=GROUPS, rates=(1e-3,), make=torch.optim.AdamW, factory=False):
    """A training workload with a group a layer, whose learning rates repeat these."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(groups)))

    def optimizer(_=None):
        return make(
            [
                {"params": layer.parameters(), "lr": rates[i % len(rates)]}
                for i, layer in enumerate(model)
            ]
        )

    return Workload.training(
        model, torch.ones(1, 2), torch.sum, optimizer if factory else optimizer()
    )


def _update(name="aten::_fused_adamw_", count=GROUPS, **known):
    """An optimizer's step of so many operators, each with a kernel of 4 us, on a GPU."""
    end = count * 20 * US
    events = [step(1, 0, 2 * MS), annotation("Optimizer.step#AdamW.step", 0, end)]
    for at in range(count):
        host = at * 20 * US
        events.append(op(name, host + US, host + 15 * US))
        events += launch(
            "k",
            call=(host + 5 * US, host + 10 * US),
            gpu=(host + 12 * US, host + 16 * US),
            correlation=at + 1,
        )
    after = launch("mm", call=(end, end + US), gpu=(end + 2 * US, 2 * MS), correlation=count + 1)
    return traced([*events, *after], **known)


@pytest.mark.parametrize("factory", [False, True])
def test_a_group_for_each_layer_is_found(factory):
    found = the(rule(_update(workload=_trained(factory=factory))))
    assert found.id == NAME
    assert "6 where 1 would do" in found.title
    assert found.transforms == ("optimizer",)
    waiting = 12 * US + 5 * 16 * US
    assert found.recoverable_ns[1] == pytest.approx(waiting * 5 / 6, rel=0.05)


def test_two_kinds_of_groups_are_left():
    found = the(rule(_update(workload=_trained(8, (1e-3, 1e-4)))))
    assert "8 where 2 would do" in found.title


def test_merging_claims_none_of_what_fusing_recovers():
    found = the(rule(_update("aten::add_", 10 * GROUPS, workload=_trained())))
    assert found.recoverable_ns[1] == pytest.approx(59 * 16 * US * 5 / 6 / 10, rel=0.05)


@pytest.mark.parametrize(
    ("groups", "rates"),
    [
        pytest.param(FEWEST, (1e-3,), id="few groups"),
        pytest.param(6, (1e-3, 1e-4, 1e-5), id="few alike"),
        pytest.param(6, range(1, 7), id="all differ"),
    ],
)
def test_groups_that_merging_hardly_reduces_are_fine(groups, rates):
    assert rule(_update(workload=_trained(groups, rates))) == ()


@pytest.mark.parametrize("workload", [None, Workload(nn.Linear(2, 2), torch.ones(1, 2))])
def test_without_the_optimizer_it_abstains(workload):
    verdict = rule(_update(workload=workload))
    assert isinstance(verdict, Abstention)
    assert "steady explain WORKLOAD" in verdict.recapture


def test_inference_has_no_optimizer():
    assert rule(traced([step(1, 0, MS), op("aten::mm", 0, US)])) == ()
