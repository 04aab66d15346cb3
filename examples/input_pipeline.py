"""Provokes input-pipeline: each step waits for its batch.

`slow` reads through a `DataLoader` whose samples take 5 ms each, like decoding images. `mended`
prepares the samples in advance. With spare cores, worker processes (`num_workers`) would also help.

    steady explain examples/input_pipeline.py:slow --device cpu
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    """Random samples, generated on access."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> torch.Tensor:
        time.sleep(5e-3)
        return torch.randn(256)


class Fed(nn.Module):
    """A step that fetches its own batch, so that the wait is part of the step."""

    def __init__(self, ready: bool) -> None:
        super().__init__()
        self.made = [torch.randn(4, 256) for _ in range(16)] if ready else None
        self.batches = iter(())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(
                DataLoader(Samples(), batch_size=4)
                if self.made is None
                else DataLoader(self.made, batch_size=None)
            )
            batch = next(self.batches)
        for _ in range(8):
            weight = weight @ weight / 16
        return batch.to(weight.device) @ weight


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Fed(ready=False), torch.randn(256, 256)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Fed(ready=True), torch.randn(256, 256)
