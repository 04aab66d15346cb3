"""Models that draw random numbers, soundly and otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadytorch.workload.start import Start, with_optimizer
from steadytorch.workload.workload import Workload

RATE = 0.2


class Net(nn.Module):
    """Two hidden layers with dropout behind each; `drop` says how."""

    def __init__(self, drop: Any = None) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(24, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.drop = drop or (lambda x: functional.dropout(x, RATE, True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.one(x)))
        return self.head(self.drop(torch.relu(self.two(x))))


def scaled(x: Tensor, keep: Tensor, rate: float = RATE) -> Tensor:
    return x * keep / (1 - rate)


def sound(x: Tensor) -> Tensor:
    """Other numbers from the same generator."""
    return scaled(x, (torch.rand(x.shape) >= RATE).float())


def shared(x: Tensor) -> Tensor:
    """Groups of four channels share a mask."""
    keep = torch.rand(x.shape[0], x.shape[1] // 4) >= RATE
    return scaled(x, keep.float().repeat_interleave(4, dim=1))


def off_by_a_tenth(x: Tensor) -> Tensor:
    """Keeps a tenth less than it should, and scales as if it did not."""
    return scaled(x, (torch.rand(x.shape) < (1 - RATE) * 0.9).float())


class _Redrawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return sound(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sound(gradients[0])


def redrawn(x: Tensor) -> Tensor:
    """Another mask in the backward pass."""
    return _Redrawn.apply(x)


def baked(x: Tensor) -> Tensor:
    """One mask for ever; the generator goes on."""
    torch.rand(1)
    generator = torch.Generator().manual_seed(x.shape[1])
    return scaled(x, (torch.rand(x.shape, generator=generator) >= RATE).float())


def rare(x: Tensor) -> Tensor:
    """Drops everything in one of ten calls, as a path is dropped for few samples."""
    return scaled(x, (torch.rand(1) >= 0.1).float(), 0.1)


def without_effect(x: Tensor) -> Tensor:
    """Draws a number that nothing depends on."""
    torch.rand(1)
    return x


def not_advanced(x: Tensor) -> Tensor:
    """New masks from a generator of its own."""
    return scaled(x, (torch.rand(x.shape, generator=_OWN) >= RATE).float())


_OWN = torch.Generator().manual_seed(0)


def workload(seed: int) -> tuple[Workload, Start]:
    torch.manual_seed(seed)
    model = Net()
    x, y = torch.randn(32, 24), torch.randint(8, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = with_optimizer(
        Workload.training(model, x, functional.cross_entropy, optimizer, targets=y)
    )
    return made, Start(made)


def variant(made: Workload, drop: Any) -> Net:
    """The workload's model on the same weights, with another dropout."""
    other = Net(drop)
    for name in ("one", "two", "head"):
        setattr(other, name, getattr(made.model, name))
    return other
