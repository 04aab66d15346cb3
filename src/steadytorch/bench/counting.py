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
COUNTED_FROM_NS = 500_000
"""Shortest iteration beside which it is counted: a power limit holds long ones, and of short ones
those after a reading would be told from the others by what an event may be off."""


@contextmanager
def counting(sampler: Sampler, device: torch.device, sample_ns: float) -> Iterator[str | None]:
    """Has periods taken meanwhile with a counter of cycles; yields the reason if they are not.

    On the CPU there is nothing to count, and no reason to give.

    Args:
        sampler: takes the periods.
        device: on which they run.
        sample_ns: what one of them takes, about.
    """
    if not isinstance(sampler, CudaSampler):
        yield None
        return
    if sample_ns < COUNTED_FROM_NS:
        yield f"an iteration is shorter than {COUNTED_FROM_NS * 1e-6} ms"
        return
    counter = _counter(device)
    sampler.counter = None if isinstance(counter, str) else counter
    sampler.typical_ns = sample_ns  # of this step; what was timed before may be another's
    try:
        yield counter if isinstance(counter, str) else None
    finally:
        sampler.counter = sampler.clocks_mhz = sampler.gaps_ns = None


@cache
def _counter(device: torch.device) -> CycleCounter | str:
    """The one of this process for a device, or the reason why there is none."""
    try:
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        return CycleCounter(cuda_driver(), device, blocks)
    except (UnsupportedError, RuntimeError) as error:  # the latter where memory is short
        return one_line(error)


def counted_of(sampler: Sampler, count: int) -> tuple[list[float], list[int]]:
    """Of the last so many periods that were taken: MHz, NaN where unknown, and the gaps before."""
    if not isinstance(sampler, CudaSampler) or not count:
        return [math.nan] * count, [0] * count
    clocks, gaps = sampler.clocks_mhz, sampler.gaps_ns
    return (
        [math.nan] * count if clocks is None else clocks[-count:].tolist(),
        [0] * count if gaps is None else gaps[-count:].tolist(),
    )


def noted(recording: Recording, why: str | None) -> Recording:
    """The recording, with the reason why the clock was not counted, if there is one."""
    if why is None:
        return recording
    return msgspec.structs.replace(recording, unknown={**recording.unknown, UNCOUNTED: why})
