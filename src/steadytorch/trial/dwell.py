"""Both sides for seconds at a stretch, where a power limit holds the GPU's clock.

Blocks of a few iterations that take turns meet one clock, the one that suits the mean draw of the
two. Each by itself would settle at its own: what a pair cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import numpy as np

from steadytorch.device.recording import Recording, reasons
from steadytorch.results.compare import Dwell
from steadytorch.trial.series import Series

POWER = "power_cap"
PROBE_S = 2.0
"""Long enough for a power limit to take hold: the driver averages the draw over a second or so."""
DWELL_S = 10.0
ROUNDS = 2

Ask = Callable[[int, float], Series]
"""Has a side (0 is A, 1 is B) run for so many seconds, without a break and to the end."""


def dwells(ask: Ask, rng: Random) -> tuple[Dwell, ...]:
    """Runs both sides for `DWELL_S` each, `ROUNDS` times in random order, if power holds the clock.

    Args:
        ask: runs a side.
        rng: decides the order within each round.

    Returns:
        In the order taken; empty where no power limit shows within `PROBE_S` of either side.
    """
    if not any(_held(ask(side, PROBE_S)) for side in (0, 1)):
        return ()
    order = [side for _ in range(ROUNDS) for side in rng.sample((0, 1), 2)]
    return tuple(_dwell("ab"[side], ask(side, DWELL_S)) for side in order)


def _held(series: Series) -> bool:
    mask = msgspec.convert(series.recording, Recording).clock_event_mask or ()
    return any(POWER in reasons(bits) for bits in set(mask))


def _dwell(side: str, series: Series) -> Dwell:
    durations = np.asarray(series.durations_ns, dtype=np.float64)
    recording = msgspec.convert(series.recording, Recording)
    clock = recording.sm_clock_mhz or ()
    return Dwell(
        side=side,
        seconds=float(durations.sum()) * series.group * 1e-9,
        median_ns=float(np.median(durations[len(durations) // 2 :])),
        sm_clock_mhz=float(np.median(clock[len(clock) // 2 :])) if clock else None,
    )
