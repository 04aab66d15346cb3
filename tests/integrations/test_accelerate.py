from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import steadytorch as steady

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")

pytestmark = pytest.mark.slow


def train():
    torch.manual_seed(0)
    runner = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(8, 2)
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
    return losses


def test_a_loop_is_watched_and_its_losses_are_the_same():
    plain = train()
    with steady.watch() as seen:
        watched = train()
    assert watched == plain
    assert seen.result.unit == "optimizer steps"
    assert len(seen.result.measured.samples_ns) == 5  # two batches make one step
