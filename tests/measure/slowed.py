"""Series in which some iterations were slow, and recordings of what happened meanwhile."""

from __future__ import annotations

import numpy as np

from steadytorch.device.recording import Recording
from steadytorch.measure.causes import attribute

MS = 1_000_000
TICK = 15 * MS
TICKS = 80
BEGAN = 10**15  # nanoseconds since boot: an origin that floats could not tell from its neighbours


def rise(at_tick, amount, *, each=0):
    """A counter that rises by `each` at every tick, and by `amount` more within one."""
    column = np.arange(TICKS) * each
    column[at_tick + 1 :] += amount
    return tuple(column.tolist())


def recorded(device="cpu", **columns):
    at = tuple(BEGAN + TICK * np.arange(TICKS))
    return Recording(device=device, interval_ns=TICK, at_ns=tuple(map(int, at)), **columns)


def slowed(slow, *, usual=10 * MS, count=100):
    """Starts and durations of `count` iterations; `slow` is index to what comes on top."""
    durations = np.full(count, usual)
    for index, extra in slow.items():
        durations[index] += extra
    starts = BEGAN + 2 * MS + np.concatenate([[0], np.cumsum(durations)[:-1]])
    return starts, durations


def tick_of(start):
    return int((start - BEGAN) // TICK)


def cause_of(recording, extra=4 * MS, at=30, **keywords):
    starts, durations = slowed({at: extra})
    return attribute(starts, durations, [at], recording, **keywords)[0]


STARTS, _ = slowed({30: 4 * MS})
START = int(STARTS[30])
THEN = tick_of(START)


def collected(start, duration):
    return {"gc_start_ns": (start,), "gc_duration_ns": (duration,), "gc_generation": (2,)}
