"""Provokes slow-kernels: the same kernel on the same shapes, now fast and now slow.

Of two batches that `slow` takes in turns, one has a key of its own for every value and the other a
single key, so that millions of additions queue up for one address. `mended` shuffles them together.
The usual cause of this finding is a clock or a neighbour; here it is the data, so that any GPU
shows it.

    steady explain examples/slow_kernels.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

VALUES = 1 << 22


class Sums(nn.Module):
    """Adds values up by key, two batches of keys in turns."""

    def __init__(self, shuffled: bool) -> None:
        super().__init__()
        keys = torch.cat([torch.randperm(VALUES), torch.zeros(VALUES, dtype=torch.int64)])
        if shuffled:
            keys = keys[torch.randperm(len(keys))]
        self.register_buffer("keys", keys.view(2, VALUES))
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.zeros_like(values).index_add_(0, self.keys[self.calls % 2], values)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Sums(shuffled=False), torch.ones(VALUES)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Sums(shuffled=True), torch.ones(VALUES)
