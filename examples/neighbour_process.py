"""Provokes neighbour-process: another program uses the same GPU.

`slow` starts a process that multiplies matrices on the GPU and keeps it until `slow` ends, for at
most two minutes. The effect on single kernels may also be found as slow-kernels. `mended` does the
same work alone.

    steady explain examples/neighbour_process.py:slow --device cuda
"""

from __future__ import annotations

import subprocess
import sys
from typing import IO

import torch
from torch import nn

# The stdin pipe closes when the starting process ends, even if it is killed.
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
    """Multiplies matrices, with or without a neighbour process."""

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
    """Start the neighbour detached, because children of the measured process are not counted.

    Returns:
        The pipe that keeps the neighbour alive.
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
