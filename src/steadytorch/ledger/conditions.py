"""Join telemetry with the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadytorch.device.recording import READ_EVERY, Recording, reasons
from steadytorch.errors import UsageError
from steadytorch.ledger.ledger import Ledger
from steadytorch.traces.events import Trace

CLOCK_DIFFERS = 0.01
"""Minimum drop of a clock below the median of the steps to be reported: one clock step of 15
MHz."""
IDLE_REASONS = frozenset({"gpu_idle", "idle"})
"""Clock-event reasons that do not hold the clock down."""


@dataclass(frozen=True)
class Conditions:
    """Telemetry during one step; None where not recorded.

    Attributes:
        sm_clock_mhz: mean SM clock of the GPU.
        power_watts: mean power of the whole GPU.
        reasons: reasons that held the clock at any time.
        other_gpu_processes: maximum number of other processes on the GPU.
        steal_ns: CPU time taken by other virtual machines, over all cores.
        wait_ns: time the measured thread was ready to run without a core.
        gc_ns: running time of Python's garbage collector.
        allocator_calls: segments that PyTorch's allocator requested or returned.
        compilations: frames whose compilation by torch.compile began.
    """

    sm_clock_mhz: float | None = None
    power_watts: float | None = None
    reasons: tuple[str, ...] = ()
    other_gpu_processes: int | None = None
    steal_ns: int | None = None
    wait_ns: int | None = None
    gc_ns: int = 0
    allocator_calls: int | None = None
    compilations: int | None = None


def join(
    trace: Trace, ledger: Ledger, recording: Recording, *, offset_ns: int
) -> tuple[Conditions, ...]:
    """Telemetry conditions during each step, in order.

    Counters are read at the telemetry ticks before and after a step, so they include events just
    outside the step. The telemetry recording must cover the whole trace.

    Args:
        trace: trace whose `origin_ns` gives its unix time.
        ledger: ledger of that trace.
        recording: telemetry of the same period.
        offset_ns: offset from the recording's times to unix time, as `time.time_ns() -
            time.perf_counter_ns()`.

    Raises:
        UsageError: the trace has no start time.
    """
    if trace.origin_ns is None:
        raise UsageError(
            f"{trace.source or 'the trace'} has no start time: telemetry cannot be joined"
        )
    shift = trace.origin_ns - offset_ns
    return tuple(
        _within(recording, step.start_ns + shift, step.end_ns + shift) for step in ledger.steps
    )


def _within(recording: Recording, begin: int, end: int) -> Conditions:
    at = np.asarray(recording.at_ns, np.int64)
    power = _level(recording.power_milliwatts, at, begin, end)
    clock = _level(recording.sm_clock_mhz, at, begin, end)
    masks = _level(recording.clock_event_mask, at, begin, end)
    others = _level(recording.other_gpu_processes, at, begin, end)
    held = reasons(int(np.bitwise_or.reduce(masks))) if masks is not None else ()
    return Conditions(
        sm_clock_mhz=None if clock is None else float(clock.mean()),
        power_watts=None if power is None else float(power.mean()) / 1000,
        reasons=tuple(reason for reason in held if reason not in IDLE_REASONS),
        other_gpu_processes=None if others is None else int(others.max()),
        steal_ns=_rise(recording, "steal_ns", at, begin, end),
        wait_ns=_rise(recording, "wait_ns", at, begin, end),
        gc_ns=_collected(recording, begin, end),
        allocator_calls=_rise(recording, "allocator_device_calls", at, begin, end),
        compilations=_rise(recording, "compilations", at, begin, end),
    )


def _level(
    column: tuple[int, ...] | None, at: np.ndarray, begin: int, end: int
) -> np.ndarray | None:
    """Values at the ticks within a step, else at the tick before the step; None if not recorded."""
    if not column:
        return None
    first, after = np.searchsorted(at, [begin, end], side="left")
    if first == after:
        first, after = max(0, first - 1), max(1, first)
    return np.asarray(column[first:after], np.int64)


def _rise(recording: Recording, channel: str, at: np.ndarray, begin: int, end: int) -> int | None:
    """Increase of a counter around a step."""
    column = getattr(recording, channel)
    if not column:
        return None
    last = len(at) - 1
    first = min(max(int(np.searchsorted(at, begin, side="right")) - 1, 0), last)
    after = min(int(np.searchsorted(at, end, side="left")) + READ_EVERY.get(channel, 1) - 1, last)
    return int(column[after] - column[first])


def _collected(recording: Recording, begin: int, end: int) -> int:
    """Time of garbage collections within a step."""
    start = np.asarray(recording.gc_start_ns, np.int64)
    until = start + np.asarray(recording.gc_duration_ns, np.int64)
    return int((np.minimum(until, end) - np.maximum(start, begin)).clip(min=0).sum())


COUNTED = (
    ("steal_ns", "other virtual machines took {} of CPU time", "{:.3f} ms", 1e-6),
    ("wait_ns", "the thread waited {} for a core", "{:.3f} ms", 1e-6),
    ("gc_ns", "garbage collection took {}", "{:.3f} ms", 1e-6),
    ("allocator_calls", "allocator calls to the driver: {}", "{:.0f}", 1),
    ("compilations", "frames compiled by torch.compile: {}", "{:.0f}", 1),
    ("other_gpu_processes", "other processes on the GPU: {}", "{:.0f}", 1),
)


def unusual(conditions: Sequence[Conditions], place: int) -> list[str]:
    """Differences of one step's conditions from the median step, one line each."""
    this = conditions[place]
    lines = []
    clocks = [c.sm_clock_mhz for c in conditions if c.sm_clock_mhz is not None]
    if this.sm_clock_mhz is not None and clocks:
        usual = float(np.median(clocks))
        if this.sm_clock_mhz < (1 - CLOCK_DIFFERS) * usual:
            held = f" (held by {', '.join(this.reasons)})" if this.reasons else ""
            lines.append(f"SM clock {this.sm_clock_mhz:,.0f} MHz, usually {usual:,.0f} MHz{held}")
    for name, text, form, scale in COUNTED:
        value = getattr(this, name)
        values = [getattr(c, name) for c in conditions if getattr(c, name) is not None]
        if value is not None and value > (usual := float(np.median(values))):
            told, usually = (form.format(each * scale) for each in (value, usual))
            lines.append(f"{text.format(told)}, usually {usually}")
    return lines
