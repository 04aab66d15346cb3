"""A block of runs timed on the device, whatever the host that feeds it is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

REPEATS = 3
LEAST_CYCLES = 200_000
"""Of the device's clock: 0.1 ms on an H200, in which a fast host enqueues a block."""
MOST_CYCLES = 2**6 * LEAST_CYCLES
TRIES = 8


class Lead:
    """Holds the device up while the host enqueues a block, where it would be there first otherwise.

    A recorded convolution of one image takes 7 us, and a slow or busy host longer to launch it:
    between two events would then lie what the host took. How long to wait is found out: not at all,
    until a run was late, and twice as long each time that one is again.
    """

    def __init__(self) -> None:
        self._cycles = 0

    def __call__(self) -> None:
        """Enqueues it."""
        if self._cycles:
            torch.cuda._sleep(self._cycles)

    def lengthen(self) -> None:
        """After a block with a run that was late."""
        self._cycles = min(MOST_CYCLES, max(LEAST_CYCLES, 2 * self._cycles))


class Flush:
    """Empties the L2 cache of all but the input, which the layer before has just written.

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
        """Enqueues it."""
        self._junk.zero_()
        self._kept.add_(0)


def block_ns(run: Callable[[], Any], flush: Flush | None, lead: Lead) -> float:
    """Median time of a few runs, each between two events.

    Where the device had come to a run before the host had enqueued it, the block is no measurement
    of the device, whatever it shows: another is taken, with a longer lead, up to `TRIES` of them.

    Args:
        run: enqueues what is timed on the current stream, best as one launch.
        flush: before each run; None for a warm cache.
        lead: before the block; one for all blocks that are compared.
    """
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(TRIES):
        lead()
        pairs, is_late = [], False
        for _ in range(REPEATS):
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
