"""What the GPU's clock did while options were timed, and what `explain` makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steadytorch.device.recorder import Recorder
from steadytorch.device.recording import Recording, reasons
from steadytorch.explain.finding import Abstention, Case, Finding
from steadytorch.explain.rules.clock_throttled import rule
from steadytorch.trial.dwell import POWER
from steadytorch.trial.series import Series


def recorded(device: str, body: Callable[[], None]) -> Recording | None:
    """Runs `body` and says what the GPU did meanwhile; None on the CPU."""
    if not device.startswith("cuda"):
        body()
        return None
    # In this process, which only waits: beside the samples and not within them.
    with Recorder(device) as recorder:
        body()
    return recorder.recording


def power_of(
    recording: Recording | None, spans: Sequence[tuple[int, int]], blocks: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What held the clock within the spans.

    Args:
        recording: of all the time; None where there is none.
        spans: a beginning and an end in ns for each block.
        blocks: what was timed, in ns per iteration.

    Returns:
        `held`, the share of the time that the power limit did; medians of `sm_clock_mhz` and
        `power_watts`; `finding`, what `explain` says of the clock over these samples. Each is None
        where it could not be observed, the last also where there is nothing to say.
    """
    names = ("held", "sm_clock_mhz", "power_watts", "finding")
    found: dict[str, Any] = dict.fromkeys(names)
    ticks = _ticks(recording, spans)
    if recording is None or not len(ticks):
        return found
    if recording.clock_event_mask is not None:
        masks = np.asarray(recording.clock_event_mask)[ticks]
        found["held"] = float(np.mean([POWER in reasons(int(mask)) for mask in masks]))
    if recording.sm_clock_mhz is not None:
        found["sm_clock_mhz"] = float(np.median(np.asarray(recording.sm_clock_mhz)[ticks]))
    if recording.power_milliwatts is not None:
        found["power_watts"] = 1e-3 * float(
            np.median(np.asarray(recording.power_milliwatts)[ticks])
        )
    told = clock_finding(in_turns(recording, spans, blocks))
    found["finding"] = None if told is None else told.title
    return found


def in_turns(
    recording: Recording, spans: Sequence[tuple[int, int]], blocks: Sequence[Sequence[int]]
) -> Series:
    """Blocks as one series beside the recording; a block ends when its span does."""
    return Series(
        durations_ns=[each for block in blocks for each in block],
        stretches=[
            (ended - sum(block), len(block))
            for (_, ended), block in zip(spans, blocks, strict=True)
        ],
        host_ns=[],
        overhead_ns=0.0,
        group=1,
        resolved=False,
        recording=recording,
    )


def clock_finding(series: Series) -> Finding | None:
    """What `explain` says of the clock beside these samples; None where it says nothing."""
    verdict = rule(Case(series=series))
    return None if isinstance(verdict, Abstention) else next(iter(verdict), None)


def _ticks(recording: Recording | None, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ticks within the spans; where one lies between two ticks, the one before it counts."""
    if recording is None or not spans or not recording.at_ns:
        return np.zeros(0, np.int64)
    at, (begun, ended) = np.asarray(recording.at_ns), np.asarray(spans).T
    first = np.maximum(0, np.searchsorted(at, begun, "right") - 1)
    last = np.maximum(first + 1, np.searchsorted(at, ended, "right"))
    return np.unique(np.concatenate([np.arange(*ends) for ends in zip(first, last, strict=True)]))
