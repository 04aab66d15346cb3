"""The eager training step is the loop that a user writes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from steadytorch.workload.step import EagerStep

DATA = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(12)]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def by_hand(model, optimizer, clip, accumulate):
    losses = []
    for i, (x, y) in enumerate(DATA):
        if i % accumulate == 0:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        (loss / accumulate if accumulate > 1 else loss).backward()
        losses.append(loss.detach())
        if i % accumulate == accumulate - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return torch.stack(losses)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_those_of_the_loop(clip, accumulate):
    one, other = net(), net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, other)]
    torch.manual_seed(1)
    expected = by_hand(one, optimizers[0], clip, accumulate)
    step = EagerStep(
        other, functional.cross_entropy, optimizers[1], clip=clip, accumulate=accumulate
    )
    torch.manual_seed(1)
    found = torch.stack([step((x,), {}, (y,)) for x, y in DATA])
    assert torch.equal(found, expected)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (step.norm is None) is (clip is None)


def test_an_exception_leaves_the_batch_to_be_begun_anew():
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = EagerStep(model, functional.cross_entropy, optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="batch"):
        step((DATA[0][0],), {}, (DATA[0][1][:2],))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    step((DATA[0][0],), {}, (DATA[0][1],))
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_an_optimizer_may_drop_gradients_its_own_way():
    class Own(torch.optim.SGD):
        dropped = 0

        def zero_grad(self):
            self.dropped += 1
            super().zero_grad()

    model = net()
    optimizer = Own(model.parameters(), lr=0.1)
    step = EagerStep(model, functional.cross_entropy, optimizer, accumulate=2)
    for x, y in DATA[:4]:
        step((x,), {}, (y,))
    assert optimizer.dropped == 2
