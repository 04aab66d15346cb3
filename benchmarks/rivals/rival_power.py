"""The GPU's clock while options were timed, and its analysis by `explain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steadytorch.bench.series import Series
from steadytorch.bench.sustained_runs import POWER
from steadytorch.device.recorder import Recorder
from steadytorch.device.recording import READ_EVERY, Recording, reasons
from steadytorch.findings.finding import Abstention, Case, Finding
from steadytorch.rules.clock_throttled import followed, rule

CHANNELS = ("sm_clock_mhz", "power_milliwatts", "clock_event_mask")
"""Fields of a recording that concern the clock."""


def recorded(device: str, body: Callable[[], None]) -> Recording | None:
    """Run `body` and record the GPU meanwhile; None on the CPU."""
    if not device.startswith("cuda"):
        body()
        return None
    # In this process, which only waits, so that recording does not disturb the samples.
    with Recorder(device) as recorder:
        body()
    return recorder.recording


def power_of(
    recording: Recording | None,
    spans: Sequence[tuple[int, int]],
    blocks: Sequence[Sequence[int]],
    clocks_mhz: Sequence[float],
) -> dict[str, Any]:
    """Summarise the clock within the spans of one option.

    Args:
        recording: recording of the whole run, or None.
        spans: start and end of each block, in ns.
        blocks: timed blocks, in ns per iteration.
        clocks_mhz: clock counted over each iteration, NaN where unknown; or empty.

    Returns:
        `clock_share`: share of the variance explained by the counted clock; None if iterations do
        not follow it. From NVML readings: `held`, the share with the clock held by the power limit;
        medians `sm_clock_mhz` and `power_watts`; `finding` and `variance_share` of `explain` for
        the clock. Each is None if not observed, the last two also if nothing was found.
    """
    names = ("clock_share", "held", "sm_clock_mhz", "power_watts", "finding", "variance_share")
    found: dict[str, Any] = dict.fromkeys(names)
    times = np.asarray([each for block in blocks for each in block], np.float64)
    if 0 < len(clocks_mhz) == len(times):
        found["clock_share"] = followed(times, np.asarray(clocks_mhz)) or None
    within = in_turns(recording, spans, blocks)
    if within is None:
        return found
    seen: Recording = within.recording
    if seen.clock_event_mask is not None:
        found["held"] = float(np.mean([POWER in reasons(mask) for mask in seen.clock_event_mask]))
    if seen.sm_clock_mhz is not None:
        found["sm_clock_mhz"] = float(np.median(seen.sm_clock_mhz))
    if seen.power_milliwatts is not None:
        found["power_watts"] = 1e-3 * float(np.median(seen.power_milliwatts))
    told = clock_finding(within)
    if told is not None:
        found |= {"finding": told.title, "variance_share": told.variance_share}
    return found


def in_turns(
    recording: Recording | None, spans: Sequence[tuple[int, int]], blocks: Sequence[Sequence[int]]
) -> Series | None:
    """Series of the blocks that contain clock readings, with these readings.

    A block ends with its span. None if no block contains a reading.
    """
    if recording is None or not spans:
        return None
    own = [_ticks(recording, span) for span in spans]
    kept = [place for place, ticks in enumerate(own) if len(ticks)]
    if not kept:
        return None
    ticks = np.concatenate([own[place] for place in kept])
    columns = {
        name: tuple(np.asarray(getattr(recording, name))[ticks].tolist())
        for name in ("at_ns", *CHANNELS)
        if getattr(recording, name) is not None
    }
    return Series(
        durations_ns=[each for place in kept for each in blocks[place]],
        stretches=[(spans[place][1] - sum(blocks[place]), len(blocks[place])) for place in kept],
        host_ns=[],
        overhead_ns=0.0,
        group=1,
        resolved=False,
        recording=Recording(device=recording.device, interval_ns=recording.interval_ns, **columns),
    )


def clock_finding(series: Series) -> Finding | None:
    """Finding of `explain` on the clock for these samples, or None."""
    verdict = rule(Case(series=series))
    return None if isinstance(verdict, Abstention) else next(iter(verdict), None)


def _ticks(recording: Recording, span: tuple[int, int]) -> np.ndarray:
    """Ticks whose clock readings were all taken within a span."""
    at, (begun, ended) = np.asarray(recording.at_ns), span
    oldest = max(READ_EVERY[name] for name in CHANNELS) - 1
    first, last = np.searchsorted(at, begun, "left"), np.searchsorted(at, ended, "right")
    return np.arange(first + oldest, last)
