"""Attributes outliers to causes, from the telemetry recorded during the measurement.

A cause must explain at least half of an outlier's excess over the median. Events that are counted
but not timed must have occurred more often than in stretches without outliers. Evidence from one
stretch of time counts only once and goes to the largest outliers first. Outliers without enough
evidence are `unattributed`: a wrong cause costs the reader more than a missing one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steadytorch.device.recording import REASON_BITS, Recording
from steadytorch.errors import UsageError
from steadytorch.measure.sampler import may_be_in_flight
from steadytorch.measure.telemetry_stretches import TelemetryStretches
from steadytorch.measure.variability import UNATTRIBUTED

GARBAGE_COLLECTION = "garbage collection"
CONTEXT_SWITCH = "context switch"
PAGE_FAULT = "page fault"
CPU_STEAL = "cpu steal"
CLOCK = "clock"
POWER_CAP = "power cap"
THERMAL = "thermal"
NEIGHBOUR = "neighbour process"
ALLOCATOR = "allocator"
RECOMPILATION = "recompilation"
CAUSES = (
    GARBAGE_COLLECTION,
    CONTEXT_SWITCH,
    PAGE_FAULT,
    CPU_STEAL,
    CLOCK,
    POWER_CAP,
    THERMAL,
    NEIGHBOUR,
    ALLOCATOR,
    RECOMPILATION,
    UNATTRIBUTED,
)
"""All possible results of `attribute`."""

EXPLAINED = 0.5
"""Share of the excess that a cause must explain, so that no other single cause explains more."""
MINOR_FAULT_NS = 500
"""Minimum time of a minor fault, which clears a 4 KiB page. 2.5 us were measured in a virtual
machine; attribution uses the minimum."""
MAJOR_FAULT_NS = 50_000
"""Minimum time of a major fault: a read from a fast SSD."""
SWITCH_NS = 10_000_000
"""Maximum assumed cost of one involuntary switch: three 3 ms slices of Linux's scheduler."""
COMPILE_LEAST_NS = 2_000_000
"""Minimum time of a compilation: torch.compile takes 20 ms for one addition without a backend."""
STEAL_LEAST_NS = 5_000_000
"""Half the resolution of the kernel's steal-time counter."""

CLOCK_LEAST = 0.01
"""Relative change at which a counted clock has moved. On an idle H200, 98 of 100 readings lie
within 0.7 %."""

_THERMAL_BITS = REASON_BITS["thermal_slowdown"] | REASON_BITS["hardware_thermal_slowdown"]
_POWER_BITS = REASON_BITS["power_cap"] | REASON_BITS["hardware_power_brake"]


def attribute(
    starts_ns: Sequence[int] | np.ndarray,
    durations_ns: Sequence[int] | np.ndarray,
    outlier_indices: Sequence[int] | np.ndarray,
    recording: Recording,
    host_ns: Sequence[int] | np.ndarray | None = None,
    *,
    group: int = 1,
    clocks_mhz: Sequence[float] | np.ndarray | None = None,
) -> list[str]:
    """Return a cause from `CAUSES` for each outlier, in the order of `outlier_indices`.

    If the host time rose with the period, only host causes qualify; otherwise only device causes.
    Without `host_ns`, host causes are tried first, then device causes. An outlier below the median
    can only be caused by a faster clock.

    Args:
        starts_ns: start of each sample on the recording's clock, shape (N,), ascending. On CUDA
            this is the host clock too, accurate to one tick.
        durations_ns: periods or latencies per iteration, shape (N,).
        outlier_indices: indices into `durations_ns`.
        recording: telemetry recorded during the measurement.
        host_ns: enqueue time of each iteration, shape (N,); None or empty if not measured.
        group: number of iterations averaged in one sample.
        clocks_mhz: counted device clock over each sample, shape (N,), NaN where unknown. None or
            empty falls back to the clock in the recording.

    Raises:
        UsageError: lengths differ, or an index is out of range.
    """
    starts, durations, host, chosen = _checked(starts_ns, durations_ns, host_ns, outlier_indices)
    if not len(chosen):
        return []
    clocks = np.asarray(() if clocks_mhz is None else clocks_mhz, dtype=np.float64)
    if not len(clocks):
        clocks = np.full(len(starts), np.nan)
    if len(clocks) != len(starts):
        raise UsageError(
            f"attribute needs one clock per sample: got {len(clocks)} for {len(starts)} samples"
        )
    inquest = _Inquest(starts, durations * group, host * group, chosen, recording, clocks)
    return inquest.causes()


def _checked(
    starts_ns: Sequence[int] | np.ndarray,
    durations_ns: Sequence[int] | np.ndarray,
    host_ns: Sequence[int] | np.ndarray | None,
    outlier_indices: Sequence[int] | np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    # Times since boot in ns need 53 bits after 104 days: integers, not floats.
    starts = np.asarray(starts_ns, dtype=np.int64)
    durations = np.asarray(durations_ns, dtype=np.float64)
    host = np.asarray(() if host_ns is None else host_ns, dtype=np.float64)
    chosen = np.asarray(outlier_indices, dtype=np.int64)
    if len(starts) != len(durations) or len(host) not in (0, len(durations)):
        raise UsageError(
            f"attribute needs one start and one host time per sample: got {len(durations)} "
            f"samples, {len(starts)} starts, {len(host)} host times"
        )
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(durations):
        raise UsageError(
            f"attribute needs outlier indices from 0 to {len(durations) - 1}: got {chosen.min()} "
            f"to {chosen.max()}"
        )
    return starts, durations, host, chosen


class _Inquest:
    """The outliers of one series, and the successive searches for their causes.

    Arrays have shape (outliers,); times are per sample, not per iteration.
    """

    def __init__(
        self,
        starts: np.ndarray,
        durations: np.ndarray,
        host: np.ndarray,
        chosen: np.ndarray,
        recording: Recording,
        clocks: np.ndarray,
    ) -> None:
        self._recording = recording
        self._clocks = clocks[chosen]
        self._usual_clock = float(np.median(known)) if len(known := clocks[clocks > 0]) else 0.0
        self._typical = float(np.median(durations))
        self._excess = durations[chosen] - self._typical
        gpu = recording.device != "cpu"
        ends = starts[chosen] + durations[chosen].astype(np.int64)
        # An estimate: the sampler sets its queue depth by the first iterations of each stretch.
        queued = may_be_in_flight(self._typical, host) if gpu and len(host) else 0
        ahead = int(queued * self._typical)
        # When the host worked for the sample, and when the device did.
        self._host_spans = np.stack([starts[chosen] - ahead, ends])
        self._spans = np.stack([starts[chosen], ends])
        self._stretches = TelemetryStretches(recording, self._host_spans)
        if gpu and len(host):
            risen = host[chosen] - np.median(host) >= EXPLAINED * self._excess
            self._host_up = (self._excess > 0) & risen
            self._device_up = ~self._host_up
        else:
            self._host_up = self._excess > 0
            self._device_up = np.full(len(chosen), gpu)
        self._causes = [UNATTRIBUTED] * len(chosen)
        self._open = np.ones(len(chosen), dtype=bool)

    def causes(self) -> list[str]:
        """Return the cause of each outlier; causes that trigger other causes are tried first."""
        self._counted("compilations", RECOMPILATION, least_ns=COMPILE_LEAST_NS)
        self._collected()
        self._counted("allocator_retries", ALLOCATOR)
        self._counted("allocator_device_calls", ALLOCATOR)
        self._timed()
        # Only the measured thread matters to a GPU program, and its waits are timed.
        if self._recording.device == "cpu" or self._recording.wait_ns is None:
            self._counted("involuntary_switches", CONTEXT_SWITCH, most_ns=SWITCH_NS)
        for place in np.flatnonzero(self._open & self._device_up):
            self._settle(int(place), self._device_cause(int(place)))
        return self._causes

    def _settle(self, place: int, cause: str) -> None:
        if cause != UNATTRIBUTED:
            self._causes[place] = cause
            self._open[place] = False

    def _pending(self) -> list[int]:
        """Return indices of host outliers without a cause, largest excess first."""
        places = np.flatnonzero(self._open & self._host_up)
        return places[np.argsort(-self._excess[places], kind="stable")].tolist()

    def _rivals(self, channel: str, place: int) -> np.ndarray:
        """Return a mask of larger unexplained host outliers that share the counter increase."""
        mine = self._excess[place]
        earlier = np.arange(len(self._open)) < place
        larger = (self._excess > mine) | ((self._excess == mine) & earlier)
        near = self._stretches.shares_a_stretch(channel, place)
        return near & larger & self._open & self._host_up

    def _collected(self) -> None:
        """Attribute outliers to overlapping garbage collections, whose times are exact."""
        starts = np.asarray(self._recording.gc_start_ns, dtype=np.int64)
        ends = starts + np.asarray(self._recording.gc_duration_ns, dtype=np.int64)
        for place in self._pending():
            begin, end = self._host_spans[:, place]
            overlap = np.minimum(ends, end) - np.maximum(starts, begin)
            if overlap.clip(min=0).sum() >= EXPLAINED * self._excess[place]:
                self._settle(place, GARBAGE_COLLECTION)

    def _counted(
        self, channel: str, cause: str, *, least_ns: int = 0, most_ns: int | None = None
    ) -> None:
        """Attribute outliers to events that are counted but not timed.

        An outlier needs one event beyond the usual number, and one more for each larger outlier
        that shares the counter's increase.

        Args:
            channel: a counter of the recording.
            cause: the cause that the counter is evidence for.
            least_ns: minimum cost of one event; smaller excesses do not qualify.
            most_ns: maximum cost of one event; None for no limit.
        """
        # Decide all before settling any: settled outliers no longer count as rivals.
        claimed = []
        for place in self._pending():
            extra = self._stretches.extra_events(channel, place)
            fits = self._excess[place] >= least_ns and (
                most_ns is None or extra * most_ns >= EXPLAINED * self._load(channel, place)
            )
            if fits and extra > np.count_nonzero(self._rivals(channel, place)):
                claimed.append(place)
        for place in claimed:
            self._settle(place, cause)

    def _timed(self) -> None:
        """Attribute outliers to waits, steal time or page faults, whichever explains the most."""
        claimed = {}
        for place in self._pending():
            faults_ns = MINOR_FAULT_NS * self._stretches.extra_events("minor_faults", place)
            faults_ns += MAJOR_FAULT_NS * self._stretches.extra_events("major_faults", place)
            wait_ns = self._stretches.extra_ns("wait_ns", place)
            shares = {
                CONTEXT_SWITCH: wait_ns / self._load("wait_ns", place),
                PAGE_FAULT: faults_ns / self._load("minor_faults", place),
            }
            if self._excess[place] >= STEAL_LEAST_NS:
                steal_ns = self._stretches.extra_ns("steal_ns", place)
                shares[CPU_STEAL] = steal_ns / self._load("steal_ns", place)
            cause = max(shares, key=lambda name: shares[name])
            if shares[cause] >= EXPLAINED:
                claimed[place] = cause
        for place, cause in claimed.items():
            self._settle(place, cause)

    def _load(self, channel: str, place: int) -> float:
        """Return the summed excess in ns of an outlier and its larger rivals on that counter."""
        return float(self._excess[place] + self._excess[self._rivals(channel, place)].sum())

    def _device_cause(self, place: int) -> str:
        begin, end = self._spans[:, place]
        clock, usual = self._clock(place)
        held, always = self._stretches.bits(begin, end)
        slower = self._excess[place] > 0
        # Extra time of the same cycles at the clock of that moment.
        longer_ns = self._typical * (usual / clock - 1) if clock else 0.0
        enough = abs(longer_ns) >= EXPLAINED * abs(self._excess[place])
        if longer_ns and enough and (longer_ns > 0) == slower:
            return (_held_by(held) if slower else None) or CLOCK
        if not slower:
            return UNATTRIBUTED
        if clock is None and (cause := _held_by(held & ~always)):
            return cause
        others, usually = self._stretches.level("other_gpu_processes", begin, end, latest=True)
        return NEIGHBOUR if others is not None and others > usually else UNATTRIBUTED

    def _clock(self, place: int) -> tuple[float | None, float]:
        """Return the clock during an outlier and the usual clock; counted clocks take precedence.

        The clock during the outlier is None if unknown. A counted clock within `CLOCK_LEAST` of the
        usual clock is returned as the usual clock.
        """
        counted, usual = float(self._clocks[place]), self._usual_clock
        if not counted > 0:
            return self._stretches.level("sm_clock_mhz", *self._spans[:, place])
        moved = abs(counted / usual - 1) >= CLOCK_LEAST
        return (counted if moved else usual), usual


def _held_by(mask: int) -> str | None:
    """Return the cause that limits the clock, if any; thermal limits take precedence."""
    if mask & _THERMAL_BITS:
        return THERMAL
    return POWER_CAP if mask & _POWER_BITS else None
