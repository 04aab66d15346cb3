"""What the GPU's clock did while options were timed, and what `explain` makes of it."""

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
"""Of the recording: those that say something of the clock."""


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
    recording: Recording | None,
    spans: Sequence[tuple[int, int]],
    blocks: Sequence[Sequence[int]],
    clocks_mhz: Sequence[float],
) -> dict[str, Any]:
    """What held the clock within the spans; readings of other turns do not count.

    Args:
        recording: of all the time; None where there is none.
        spans: a beginning and an end in ns for each block.
        blocks: what was timed, in ns per iteration.
        clocks_mhz: counted over each iteration, NaN where unknown; or none.

    Returns:
        `clock_share`, the share of the variance by which iterations follow the clock that was
        counted, None where they do not. By NVML's readings: `held`, the share of these at which the
        power limit held the clock; medians of `sm_clock_mhz` and `power_watts`; `finding` and
        `variance_share`, what `explain` says of the clock over these samples. Each is None where it
        could not be observed, the last two also where there is nothing to say.
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
    """Those blocks within which the clock was read, as one series, and these readings.

    A block ends when its span does. None where the clock was read within none.
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
    """What `explain` says of the clock beside these samples; None where it says nothing."""
    verdict = rule(Case(series=series))
    return None if isinstance(verdict, Abstention) else next(iter(verdict), None)


def _ticks(recording: Recording, span: tuple[int, int]) -> np.ndarray:
    """The ticks of which all that they hold of the clock was read within a span."""
    at, (begun, ended) = np.asarray(recording.at_ns), span
    oldest = max(READ_EVERY[name] for name in CHANNELS) - 1
    first, last = np.searchsorted(at, begun, "left"), np.searchsorted(at, ended, "right")
    return np.arange(first + oldest, last)
