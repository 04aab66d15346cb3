"""Counts a GPU's clock cycles while the periods of a workload's iterations are timed."""

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
"""Key in `Recording.unknown` for the reason why cycles were not counted."""
COUNTED_FROM_NS = 500_000
"""Shortest iteration time at which cycles are counted. Power limits matter for long iterations; for
short ones the error of an event would distort the samples after a reading."""


@contextmanager
def counting(sampler: Sampler, device: torch.device, sample_ns: float) -> Iterator[str | None]:
    """Counts GPU cycles of periods timed in the `with` block; yields None, or why it cannot count.

    Also yields None on the CPU, where no cycles are counted.

    Args:
        sampler: the sampler that takes the periods.
        device: the device they run on.
        sample_ns: approximate time of one sample.
    """
    if not isinstance(sampler, CudaSampler):
        yield None
        return
    if sample_ns < COUNTED_FROM_NS:
        yield f"an iteration is shorter than {COUNTED_FROM_NS * 1e-6} ms"
        return
    counter = counter_of(device)
    sampler.counter = None if isinstance(counter, str) else counter
    sampler.typical_ns = sample_ns  # the sampler may have timed another step before
    try:
        yield counter if isinstance(counter, str) else None
    finally:
        sampler.counter = sampler.clocks_mhz = sampler.gaps_ns = None


@cache
def counter_of(device: torch.device) -> CycleCounter | str:
    """This process's cycle counter for a device, or the reason why there is none."""
    try:
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        return CycleCounter(cuda_driver(), device, blocks)
    except (UnsupportedError, RuntimeError) as error:  # RuntimeError: out of memory
        return one_line(error)


def counted_of(sampler: Sampler, count: int) -> tuple[list[float], list[int]]:
    """Returns clock in MHz (NaN if unknown) and preceding gap in ns of the last `count` periods."""
    if not isinstance(sampler, CudaSampler) or not count:
        return [math.nan] * count, [0] * count
    clocks, gaps = sampler.clocks_mhz, sampler.gaps_ns
    return (
        [math.nan] * count if clocks is None else clocks[-count:].tolist(),
        [0] * count if gaps is None else gaps[-count:].tolist(),
    )


def noted(recording: Recording, why: str | None) -> Recording:
    """Adds the reason why cycles were not counted to a recording; no change if `why` is None."""
    if why is None:
        return recording
    return msgspec.structs.replace(recording, unknown={**recording.unknown, UNCOUNTED: why})
