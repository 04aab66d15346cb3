"""Provokes idle-ramp: a call after a pause is slower than a call after another call.

On a GPU, the clock falls when idle. Here a connection with an idle timeout simulates that, so that
any machine shows the finding. `slow` has to reopen it after 10 ms. `mended` keeps it open.
`--pause` measures calls with pauses between them.

    steady explain examples/idle_ramp.py:slow --device cpu --pause 25ms
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn

OPENING_S, ANSWERING_S = 0.04, 0.02


class Remote(nn.Module):
    """Simulates a matrix product on a remote machine."""

    def __init__(self, closes_after_s: float) -> None:
        super().__init__()
        self.closes_after_s, self.used_s = closes_after_s, -math.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if time.monotonic() - self.used_s > self.closes_after_s:
            time.sleep(OPENING_S)
        time.sleep(ANSWERING_S)
        result = x @ x
        self.used_s = time.monotonic()
        return result


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Remote(closes_after_s=0.01), torch.eye(128)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Remote(closes_after_s=math.inf), torch.eye(128)
