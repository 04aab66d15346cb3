"""What the GPU's clock did while options were timed, and whether the power limit held it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steadytorch.device.recorder import Recorder
from steadytorch.device.recording import Recording, reasons
from steadytorch.trial.dwell import POWER


def recorded(device: str, body: Callable[[], None]) -> Recording | None:
    """Runs `body` and says what the GPU did meanwhile; None on the CPU."""
    if not device.startswith("cuda"):
        body()
        return None
    # In this process, which only waits: beside the samples and not within them.
    with Recorder(device) as recorder:
        body()
    return recorder.recording


def power_of(recording: Recording | None, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What held the clock within the spans, each a beginning and an end in ns.

    Returns:
        `held`, the share of the time that the power limit did; medians of `sm_clock_mhz` and
        `power_watts`; each None where it could not be observed.
    """
    found: dict[str, Any] = {"held": None, "sm_clock_mhz": None, "power_watts": None}
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
    return found


def _ticks(recording: Recording | None, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ticks within the spans; where one lies between two ticks, the one before it counts."""
    if recording is None or not spans or not recording.at_ns:
        return np.zeros(0, np.int64)
    at, (begun, ended) = np.asarray(recording.at_ns), np.asarray(spans).T
    first = np.maximum(0, np.searchsorted(at, begun, "right") - 1)
    last = np.maximum(first + 1, np.searchsorted(at, ended, "right"))
    return np.unique(np.concatenate([np.arange(*ends) for ends in zip(first, last, strict=True)]))
