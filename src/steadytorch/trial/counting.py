"""The clock of a GPU, counted beside the periods of a series."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import msgspec
import torch

from steadytorch.device.cycles import CycleCounter
from steadytorch.device.driver import cuda_driver
from steadytorch.device.recording import Recording
from steadytorch.errors import UnsupportedError, one_line
from steadytorch.measure.sampler import CudaSampler, Sampler

UNCOUNTED = "sm_cycles"
"""Under this name a recording says why the clock was not counted."""


@contextmanager
def counting(sampler: Sampler, device: torch.device) -> Iterator[str | None]:
    """Has periods taken meanwhile with a counter of cycles; yields the reason if that cannot be.

    On the CPU there is nothing to count, and no reason to give.
    """
    if not isinstance(sampler, CudaSampler):
        yield None
        return
    counter = _counter(device)
    sampler.counter = None if isinstance(counter, str) else counter
    try:
        yield counter if isinstance(counter, str) else None
    finally:
        sampler.counter = sampler.clocks_mhz = None


@cache
def _counter(device: torch.device) -> CycleCounter | str:
    """The one of this process for a device, or the reason why there is none."""
    try:
        return CycleCounter(cuda_driver(), device)
    except (UnsupportedError, RuntimeError) as error:  # the latter where memory is short
        return one_line(error)


def clocks_of(sampler: Sampler, count: int) -> list[float]:
    """MHz over the last so many periods that were taken; NaN where that was not counted."""
    found = sampler.clocks_mhz if isinstance(sampler, CudaSampler) else None
    if found is None or not count:
        return [math.nan] * count
    return found[-count:].tolist()


def noted(recording: Recording, why: str | None) -> Recording:
    """The recording, with the reason why the clock was not counted, if there is one."""
    if why is None:
        return recording
    return msgspec.structs.replace(recording, unknown={**recording.unknown, UNCOUNTED: why})
