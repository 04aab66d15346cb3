from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from steadytorch.findings.finding import Abstention, Case
from steadytorch.findings.watched_steps import Setting, SteppedOptimizer
from steadytorch.ledger.ledger import build_ledger
from steadytorch.rules.unfused_optimizer import NAME, rule

from ..findings.cases import MS, US, annotation, launch, op, step, the, traced, watched
from ..traces.profiled import trace_of

FOREACH = ["aten::_foreach_lerp_", "aten::_foreach_mul_", "aten::_foreach_addcdiv_"]


def _update(names=FOREACH, optimizer="AdamW", step_ns=MS):
    """An optimizer's step that calls these, each with a kernel of 4 us, on a GPU."""
    events = [
        step(1, 0, step_ns),
        annotation(f"Optimizer.step#{optimizer}.step", 0, len(names) * 20 * US),
    ]
    for at, name in enumerate(names):
        host = at * 20 * US
        events.append(op(name, host + US, host + 15 * US))
        events += launch(
            "k",
            call=(host + 5 * US, host + 10 * US),
            gpu=(host + 12 * US, host + 16 * US),
            correlation=at + 1,
        )
    end = len(names) * 20 * US
    after = launch(
        "mm", call=(end, end + US), gpu=(end + 2 * US, step_ns), correlation=len(names) + 1
    )
    return [*events, *after]


def test_passes_over_all_tensors_are_found():
    found = the(rule(traced(_update())))
    assert found.id == NAME
    assert "3 operators a step" in found.title
    assert "fused=True" in found.fix
    assert found.transforms == ("optimizer",)
    assert "AdamW" in found.evidence[0]
    working, waiting = 3 * 4 * US, 12 * US + 2 * 16 * US
    assert found.cost_ns == pytest.approx(working + waiting, rel=0.05)
    assert found.recoverable_ns[1] == pytest.approx(found.cost_ns * 2 / 3, rel=0.05)


@pytest.mark.parametrize("name", ["aten::_fused_adamw_", "triton_for_fused_0"])
def test_a_fused_or_compiled_optimizer_is_fine(name):
    assert rule(traced(_update([*FOREACH, name]))) == ()


def test_an_optimizer_without_a_fused_implementation_is_fine():
    assert rule(traced(_update(optimizer="RMSprop"))) == ()


def test_two_passes_are_fine():
    assert rule(traced(_update(FOREACH[:2]))) == ()


def test_a_short_part_of_the_step_is_fine():
    assert rule(traced(_update(step_ns=10 * MS))) == ()


def test_single_tensors_are_another_finding():
    assert rule(traced(_update(["aten::add_"] * 30))) == ()


def test_inference_has_no_optimizer():
    assert rule(traced([step(1, 0, MS), op("aten::mm", 0, US)])) == ()


def test_training_without_a_marked_optimizer_abstains():
    events = [step(1, 0, MS), op("autograd::engine::evaluate_function: MmBackward0", 0, US)]
    verdict = rule(traced(events))
    assert isinstance(verdict, Abstention)
    assert "Optimizer.step#" in verdict.recapture


@pytest.mark.parametrize(
    ("options", "found"), [({"foreach": True}, True), ({"fused": True}, False)]
)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_a_real_optimizer_is_found_until_it_is_fused(make, options, found):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    optimizer = make(model.parameters(), **options)
    model(torch.ones(2, 4)).sum().backward()
    read = trace_of(optimizer.step)
    assert bool(rule(Case(trace=read, ledger=build_ledger(read)))) is found


def test_a_watched_optimizer_counts_from_a_fifth_of_the_time_unless_fused():
    plain = Setting(optimizers=(SteppedOptimizer("Adam", False), SteppedOptimizer("Lion", True)))
    found = the(rule(watched(optimizer=5 * MS, setting=plain)))
    assert found.title.endswith("5.00 ms a step: Adam is not fused")
    assert rule(watched(optimizer=2 * MS, setting=plain)) == ()
    fused = Setting(optimizers=(SteppedOptimizer("Adam", True),))
    assert rule(watched(optimizer=5 * MS, setting=fused)) == ()


def test_watched_single_tensors_with_a_fused_implementation_count_from_a_tenth():
    single = Setting(optimizers=(SteppedOptimizer("AdamW", False, 242, single=True),))
    found = the(rule(watched(optimizer=1.5 * MS, setting=single)))
    assert found.evidence[0] == "AdamW updates 242 parameters, one after another"
    assert found.confidence == "high"
    assert rule(watched(optimizer=MS, setting=single)) == ()
    few = Setting(optimizers=(SteppedOptimizer("AdamW", False, 8, single=True),))
    assert rule(watched(optimizer=1.5 * MS, setting=few)) == ()


def test_steps_that_waited_for_cores_do_not_hide_the_optimizer():
    plain = Setting(optimizers=(SteppedOptimizer("Adam", False, 242),))
    backward = np.where(np.arange(100) % 2, 0, 80 * MS)
    case = watched(optimizer=4 * MS, backward=backward, setting=plain)
    assert case.watched.share("optimizer") < 0.1
    found = the(rule(case))
    assert "29 % of the faster half of the steps" in found.evidence
