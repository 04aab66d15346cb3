from __future__ import annotations

import pytest
import torch
from torch import nn

from steadytorch.findings.finding import Abstention, Case
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rules.single_tensor_optimizer import NAME, rule

from ..findings.cases import MS, US, annotation, launch, op, step, the, trace, traced
from ..traces.profiled import trace_of

STEP = "Optimizer.step#SGD.step"


def _update(names, count=20, mark=STEP, step_ns=20 * MS):
    """An optimizer's step that calls these for each of its tensors, on a GPU."""
    events = [step(1, 0, step_ns), annotation(mark, 0, count * len(names) * 20 * US)]
    for at in range(count * len(names)):
        host = at * 20 * US
        events.append(op(names[at % len(names)], host + US, host + 15 * US))
        events += launch(
            "k",
            call=(host + 5 * US, host + 10 * US),
            gpu=(host + 12 * US, host + 16 * US),
            correlation=at + 1,
        )
    return events


def test_one_operator_after_the_other_is_found():
    found = the(rule(traced(_update(["aten::mul_", "aten::add_"]))))
    assert found.id == NAME
    assert "40 operators a step" in found.title
    assert "fused=True" in found.fix
    assert found.transforms == ("optimizer",)
    working, waiting = 40 * 4 * US, 39 * 16 * US
    assert found.cost_ns == pytest.approx(working + waiting, rel=0.05)
    assert found.recoverable_ns[1] == pytest.approx(working / 2 + waiting, rel=0.05)


@pytest.mark.parametrize("name", ["aten::_foreach_add_", "aten::_fused_adamw_"])
def test_one_operator_for_all_tensors_is_fine(name):
    assert rule(traced(_update([name]))) == ()


def test_a_model_of_few_tensors_gains_nothing():
    assert rule(traced(_update(["aten::add_"], count=19))) == ()


def test_a_short_part_of_the_step_is_fine():
    update = ["aten::mul_", "aten::add_"]
    assert the(rule(traced(_update(update, step_ns=20 * MS)))).id == NAME
    work = launch("mm", call=(2 * MS, 2 * MS + US), gpu=(3 * MS, 200 * MS), correlation=999)
    assert rule(traced([*_update(update, step_ns=200 * MS), *work])) == ()


def test_a_single_operator_for_each_tensor_leaves_nothing_to_recover():
    read = trace(
        [step(1, 0, MS), annotation(STEP, 0, MS)]
        + [op("aten::add_", at * 20 * US, at * 20 * US + 15 * US) for at in range(40)]
    )
    assert rule(Case(trace=read, ledger=build_ledger(read))) == ()


def test_inference_has_no_optimizer():
    assert rule(traced([step(1, 0, MS), op("aten::mm", 0, US)])) == ()


def test_training_without_a_marked_optimizer_abstains():
    events = [step(1, 0, MS), op("autograd::engine::evaluate_function: MmBackward0", 0, US)]
    verdict = rule(traced(events))
    assert isinstance(verdict, Abstention)
    assert "Optimizer.step#" in verdict.recapture


def test_without_a_trace_it_abstains():
    assert isinstance(rule(Case()), Abstention)


@pytest.mark.parametrize(
    ("name", "fix", "transforms"),
    [
        ("AdamW", "fused=True", ("optimizer",)),
        ("RMSprop", "foreach=True", ("optimizer",)),
        ("Own", "torch._foreach", ()),
    ],
)
def test_on_a_gpu_the_fix_is_what_the_class_has(name, fix, transforms):
    mark = f"Optimizer.step#{name}.step"
    found = the(rule(traced(_update(["aten::mul_", "aten::add_"], mark=mark))))
    assert fix in found.fix
    assert found.transforms == transforms


class _Own(torch.optim.Optimizer):
    """A user's optimizer, with these operators for each parameter."""

    def __init__(self, parameters, operators):
        super().__init__(parameters, {"lr": 0.1})
        self.operators = operators

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            for operator in self.operators:
                operator(parameter, 1.0)


def _case_of(make, **options):
    """A case of one step on the CPU for 24 parameters."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    optimizer = make(model.parameters(), **options)
    model(torch.ones(2, 4)).sum().backward()
    read = trace_of(optimizer.step)
    return Case(trace=read, ledger=build_ledger(read))


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.NAdam])
def test_on_a_cpu_foreach_is_only_a_candidate(make):
    found = the(rule(_case_of(make, foreach=False)))
    assert found.confidence == "low"
    assert found.fix.startswith("`steady tune` measures")
    assert found.transforms == ("optimizer",)


def test_on_a_cpu_a_fused_implementation_is_advised_alone():
    found = the(rule(_case_of(torch.optim.AdamW, foreach=False)))
    assert found.confidence == "high"
    assert found.fix == "Create the optimizer with fused=True."


def test_on_a_cpu_there_is_no_advice_for_an_optimizer_of_the_users_own():
    assert rule(_case_of(_Own, operators=(torch.Tensor.mul_, torch.Tensor.add_))) == ()


@pytest.mark.parametrize(("fused", "found"), [(False, True), (True, False)])
def test_a_real_optimizer_on_the_cpu_is_found_until_it_is_fused(fused, found):
    assert bool(rule(_case_of(torch.optim.AdamW, fused=fused, foreach=False))) is found
