"""Time that a search on a CPU leaves for compiling what a served call does on the host."""

from __future__ import annotations

import time

import torch

from steadytorch.native import host
from steadytorch.tune.prepare import Watcher

LONG_S, RESERVE_S = 180.0, 30.0
"""Budgets that can spare it, and what they spare: it takes 10 to 25 s of one core."""


def reserve_s(device: str, budget_s: float) -> float:
    """Seconds of the budget to leave; 0 where it is there, cannot be made, or is made elsewhen.

    Searches on GPUs make it in the background. On a CPU what is timed takes every core, and so does
    what is set up.
    """
    on_cpu = torch.device(device).type == "cpu"
    return RESERVE_S if on_cpu and budget_s >= LONG_S and host.is_missing() else 0.0


def compile_now(seconds: float, watcher: Watcher) -> None:
    """Has it compiled, for every later process; given up after so long.

    Raises:
        KeyboardInterrupt: interrupted; the compiler is gone.
    """
    if (making := host.begin()) is None:
        return
    watcher.phase("compiling the host's part of a call, once for this PyTorch")
    end = time.monotonic() + seconds
    try:
        while not making.is_through(0.25) and time.monotonic() < end:
            watcher.tick()
        making.finish(0)
    finally:
        making.stop()
