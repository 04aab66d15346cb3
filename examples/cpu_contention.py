"""Provokes cpu-contention: other programs compete for the cores.

`slow` starts two busy processes per core and keeps them until it ends, for at most a minute.
`mended` does the same work without them. On a busy machine it correctly shows the finding too.

    steady explain examples/cpu_contention.py:slow --device cpu
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import nn

# The child's stdin pipe closes when the parent ends, even if it is killed.
BUSY = """
import select, sys, time
until = time.monotonic() + 60
while time.monotonic() < until and not select.select([sys.stdin], [], [], 0)[0]:
    sum(range(100_000))
"""


class Crowded(nn.Module):
    """Multiplies matrices, with or without competing processes."""

    def __init__(self, company: bool) -> None:
        super().__init__()
        self.company = company
        self.others: list[subprocess.Popen[bytes]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.company and not self.others:
            command = [sys.executable, "-c", BUSY]
            count = 2 * (os.cpu_count() or 1)
            self.others = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
        return x @ x


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Crowded(company=True), torch.randn(256, 256)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Crowded(company=False), torch.randn(256, 256)
