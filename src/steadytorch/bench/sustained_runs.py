"""Sustained runs of each side of a comparison, for GPUs that reach their power limit.

Short alternating blocks share one GPU clock, set by the mean power draw of both sides. If a side
runs alone, the GPU settles at that side's own clock, which alternating blocks cannot show.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import numpy as np

from steadytorch.bench.series import Series
from steadytorch.device.recording import Recording, reasons
from steadytorch.results.compare import SustainedRun

POWER = "power_cap"
PROBE_S = 2.0
"""Long enough for a power limit to act: the driver averages power over about a second."""
SUSTAINED_S = 10.0
ROUNDS = 2

Ask = Callable[[int, float], Series]
"""Runs a side (0 is A, 1 is B) for a number of seconds without a break."""


def run_sustained(ask: Ask, rng: Random) -> tuple[SustainedRun, ...]:
    """Runs each side for `SUSTAINED_S`, `ROUNDS` times in random order, if a power limit is active.

    Args:
        ask: runs a side.
        rng: decides the order within each round.

    Returns:
        The runs in the order taken; empty if neither side reaches a power limit within `PROBE_S`.
    """
    if not any(_held(ask(side, PROBE_S)) for side in (0, 1)):
        return ()
    order = [side for _ in range(ROUNDS) for side in rng.sample((0, 1), 2)]
    return tuple(_sustained_run("ab"[side], ask(side, SUSTAINED_S)) for side in order)


def _held(series: Series) -> bool:
    mask = msgspec.convert(series.recording, Recording).clock_event_mask or ()
    return any(POWER in reasons(bits) for bits in set(mask))


def _sustained_run(side: str, series: Series) -> SustainedRun:
    durations = np.asarray(series.durations_ns, dtype=np.float64)
    recording = msgspec.convert(series.recording, Recording)
    clock = recording.sm_clock_mhz or ()
    return SustainedRun(
        side=side,
        seconds=float(durations.sum()) * series.group * 1e-9,
        median_ns=float(np.median(durations[len(durations) // 2 :])),
        sm_clock_mhz=float(np.median(clock[len(clock) // 2 :])) if clock else None,
    )
