"""Provokes slow-kernels: the same kernel on the same shapes is sometimes fast, sometimes slow.

`slow` alternates two batches. In one, every value has its own key; in the other, all share a key,
so millions of atomic additions contend for one address. `mended` shuffles the batches together. The
usual causes of this finding are clocks or neighbours. Here it is the data, so any GPU shows it.

    steady explain examples/slow_kernels.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn

VALUES = 1 << 22


class Sums(nn.Module):
    """Sums values by key, alternating between two batches of keys."""

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
