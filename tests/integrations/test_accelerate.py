from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import steadytorch as steady
from steadytorch.workload.workload import Workload

from .plans import plan_of

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")

pytestmark = pytest.mark.slow


def train(plan=None, precision="no"):
    torch.manual_seed(0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    runner = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
    )
    model = torch.nn.Linear(8, 2)
    if plan is not None:
        model = plan.apply(model)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 2, (48,)))
    model, chosen, loader = runner.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, 4, shuffle=True)
    )
    losses = []
    for x, y in loader:
        with runner.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            runner.backward(loss)
            chosen.step()
            chosen.zero_grad()
        losses.append(loss.item())
    return losses, runner.unwrap_model(model)


@pytest.fixture
def plan():
    net, x, y = torch.nn.Linear(8, 2), torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    loss = torch.nn.functional.cross_entropy
    return plan_of(Workload.training(net, x, loss, torch.optim.SGD, targets=y))


def test_a_loop_is_watched_and_its_losses_are_the_same():
    plain, _ = train()
    with steady.watch() as seen:
        watched, _ = train()
    assert watched == plain
    assert seen.result.unit == "optimizer steps"
    assert len(seen.result.measured.samples_ns) == 5  # two batches make one step


def test_a_plan_applied_before_prepare_serves_with_equal_losses(plan):
    plain, model = train()
    losses, fast = train(plan)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert fast.report().hits == 12
    torch.testing.assert_close(fast.state_dict(), model.state_dict())


def test_mixed_precision_of_accelerate_is_kept_and_no_plan_serves(plan):
    plain, _ = train(precision="bf16")
    losses, fast = train(plan, precision="bf16")
    assert losses == plain
    assert losses != train()[0]
    assert fast.report().hits == 0
    assert fast.report().off.startswith("_original_forward was set")
