"""Device timing of a block of runs, independent of delays on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

REPEATS = 3
LEAST_CYCLES = 200_000
"""Device cycles: 0.1 ms on an H200, in which a fast host enqueues a block."""
MOST_CYCLES = 2**6 * LEAST_CYCLES
TRIES = 8


class Lead:
    """Delays the device so that the host can enqueue a whole block ahead of it.

    A convolution of one image, captured in a CUDA graph, takes 7 us. A slow or busy host takes
    longer to launch the convolution, and CUDA events would then measure the host. The delay starts
    at zero, and doubles whenever the device waited for the host.
    """

    def __init__(self) -> None:
        self._cycles = 0

    def __call__(self) -> None:
        """Enqueue the delay."""
        if self._cycles:
            torch.cuda._sleep(self._cycles)

    def lengthen(self) -> None:
        """Increase the delay; for use after a block in which the device waited for the host."""
        self._cycles = min(MOST_CYCLES, max(LEAST_CYCLES, 2 * self._cycles))


class Flush:
    """Evicts everything from the L2 cache except the input, as if a previous layer had written it.

    Args:
        device: a CUDA device.
        kept: the input.
    """

    def __init__(self, device: torch.device, kept: Tensor) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        size = 2 * max(properties.L2_cache_size, 32 * 2**20)
        self._junk = torch.empty(size, dtype=torch.uint8, device=device)
        self._kept = kept

    def __call__(self) -> None:
        """Enqueue the flush."""
        self._junk.zero_()
        self._kept.add_(0)


def block_ns(
    run: Callable[[], Any], flush: Flush | None, lead: Lead, repeats: int = REPEATS
) -> float:
    """Median time of `repeats` runs in ns, each timed between two CUDA events.

    If the device waited for the host, the block is repeated with a longer delay before the runs, up
    to `TRIES` times.

    Args:
        run: enqueues the work on the current stream, preferably as one launch.
        flush: called before each run; None for a warm cache.
        lead: called before the block; share one among all blocks that are compared.
        repeats: number of runs.
    """
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(TRIES):
        lead()
        pairs, is_late = [], False
        for _ in range(repeats):
            if flush is not None:
                flush()
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            is_late |= begin.query()
            end.record()
            pairs.append((begin, end))
        if not is_late:
            break
        lead.lengthen()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) * 1e6 for begin, end in pairs]))
