"""Provokes neighbour-process: another program computes on the same GPU.

`slow` starts a process that multiplies matrices there and keeps it until it ends itself, or for
two minutes at the most; what the company does to single kernels may be found as slow-kernels.
`mended` is the same work alone.

    steady explain examples/neighbour_process.py:slow --device cuda
"""

from __future__ import annotations

import subprocess
import sys
from typing import IO

import torch
from torch import nn

# The pipe closes when whoever started it ends, however that comes about.
BUSY = """
import select, sys, time, torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("ready", flush=True)
until = time.monotonic() + 120
while time.monotonic() < until and not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(10):
        x @ x
    torch.cuda.synchronize()
"""


class Crowded(nn.Module):
    """Multiplies matrices, in company or alone."""

    def __init__(self, company: bool) -> None:
        super().__init__()
        self.company, self.keep_alive = company, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.company and self.keep_alive is None:
            self.keep_alive = start_neighbour()
        for _ in range(10):
            y = x @ x
        return y


def start_neighbour() -> IO[bytes] | None:
    """Starts it as a stranger: a child of the measured process would count as its own.

    Returns:
        The pipe that keeps it alive.
    """
    command = ["sh", "-c", 'exec 3<&0; "$0" -c "$1" <&3 &', sys.executable, BUSY]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert shell.stdout is not None
    if shell.stdout.readline() != b"ready\n":
        raise RuntimeError("the neighbour could not use the GPU")
    shell.wait()
    return shell.stdin


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Crowded(company=True), torch.randn(2048, 2048, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Crowded(company=False), torch.randn(2048, 2048, dtype=torch.bfloat16)
