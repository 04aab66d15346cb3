"""Compiles the native code that runs served calls, within the budget of a search on a CPU."""

from __future__ import annotations

import time

import torch

from steadytorch.native import host
from steadytorch.tune.setup_scheduler import ProgressListener

LONG_S, RESERVE_S = 180.0, 30.0
"""Shortest budget with a reserve, and the reserve. Compiling takes 10 to 25 s of one core."""


def reserve_s(device: str, budget_s: float) -> float:
    """Seconds of the search budget to reserve for compiling native code.

    The reserve is 0 if the native code exists or cannot be compiled, or if the budget is below
    `LONG_S`. Searches on GPUs reserve nothing, because they compile native code in the background.
    On a CPU, set-up and timing use every core.
    """
    on_cpu = torch.device(device).type == "cpu"
    return RESERVE_S if on_cpu and budget_s >= LONG_S and host.is_missing() else 0.0


def compile_now(seconds: float, watcher: ProgressListener) -> None:
    """Compiles and caches the native code for all later processes, for at most `seconds`.

    Raises:
        KeyboardInterrupt: interrupted by the user; the compiler has ended.
    """
    if (making := host.begin()) is None:
        return
    watcher.phase("compiling native host code, once per PyTorch version")
    end = time.monotonic() + seconds
    try:
        while not making.is_through(0.25) and time.monotonic() < end:
            watcher.tick()
        making.finish(0)
    finally:
        making.stop()
