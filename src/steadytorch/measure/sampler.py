"""Times iterations one by one, on the CPU and on CUDA devices.

Period and latency are measured in separate blocks, because synchronising changes the workload.

The *period* is the time from the end of one iteration to the end of the next, with the device's
queue kept full. At least two iterations are in flight; up to `LEAD_NS` of work is queued if the
driver's queue has room. Gaps between iterations count towards the period, so launch-bound work
shows as launch-bound.

The *latency* is the time from the call to its finished result, with the device's queue empty before
and after. On the CPU, a call returns with its result, so period and latency are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from steadytorch.measure.clock import Clock, HostClock
from steadytorch.results.measure import WarmUp

GROUPING_BELOW_NS = 100_000
"""Shorter iterations are timed in groups, because CUDA events resolve 0.5 us."""

IN_FLIGHT, MOST_IN_FLIGHT = 2, 64
"""Minimum and maximum number of iterations queued or running on the device."""
LEAD_NS = 4_000_000
"""Target amount of queued device work: it covers a 3 ms slice that Linux gives another process."""
BACKLOG_NS = 1_000_000
"""Maximum host time spent on enqueueing the iterations in flight. At 2 us a launch, this fills half
of the driver's queue of 1,022 launches. A full queue blocks launches, so device-bound work would
look launch-bound."""

COMPARABLE_NS = 100_000_000
"""End-of-block notification lags by about 20 us, 0.02 % of this."""
CLOCKS_AGREE = 1e-3
"""Maximum relative difference between device and host clock; above it, periods are unreliable."""
READ_CYCLES_NS = 2_000_000
"""Minimum time between counter readings: a fifth of the interval at which a power limit changes an
H200's clock."""

Step = Callable[[], Any]


class StepError(Exception):
    """The step raised an exception, chained as the cause; keeps earlier iteration times.

    Attributes:
        durations_ns: durations of the finished iterations, shape (finished,).
        host_ns: host times of the finished iterations, shape (finished,).
    """

    def __init__(self, durations_ns: np.ndarray, host_ns: np.ndarray) -> None:
        super().__init__(f"the step raised in iteration {len(durations_ns)}")
        self.durations_ns, self.host_ns = durations_ns, host_ns


class Counter(Protocol):
    """A cycle counter of a device, such as `device.cycles.CycleCounter`."""

    def read(self, place: int, stream: int) -> bool:
        """Enqueue counter reading number `place`; return False if full or the launch fails."""
        ...

    def clocks_mhz(self, count: int) -> np.ndarray:
        """Return the clock in MHz between successive readings up to `count`, shape (count - 1,)."""
        ...


class Sampler(Protocol):
    """Times iterations of a step on one kind of device.

    `periods` and `latencies` raise `StepError` if the step raises.
    """

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return period and host enqueue time of `count` iterations, both in ns, shape (count,)."""
        ...

    def latencies(self, step: Step, count: int) -> np.ndarray:
        """Return the synchronised latency of `count` iterations in ns, shape (count,)."""
        ...

    def clock_difference(self) -> float | None:
        """Return the ratio of all measured time by device clock and by host clock, minus one.

        Returns None if there is only one clock, or if less than `COMPARABLE_NS` was timed.
        """
        ...


class HostSampler:
    """Times steps that are complete when they return.

    Args:
        clock: the host clock.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return periods and host times of `count` iterations in ns, gaps in between included."""
        boundaries = np.empty(count + 1, dtype=np.int64)
        boundaries[0] = self._clock.now_ns()
        for i in range(count):
            try:
                step()
            except Exception as error:
                done = np.diff(boundaries[: i + 1])
                raise StepError(done, done) from error
            boundaries[i + 1] = self._clock.now_ns()
        periods = np.diff(boundaries)
        return periods, periods

    def latencies(self, step: Step, count: int) -> np.ndarray:
        """Return the periods; on the CPU, latency and period are the same."""
        return self.periods(step, count)[0]

    def clock_difference(self) -> None:
        """Return None: there is only one clock."""


class CudaSampler:
    """Times steps that enqueue work on the current CUDA stream.

    Args:
        clock: the host's clock, for enqueue time and latency.

    Attributes:
        counter: clock counter of the device, or None. It is read between iterations and at both
            ends of a series; reading time is not part of any period.
        typical_ns: approximate step time; sets how often the counter is read. 0 if unknown: the
            counter is then read after every iteration.
        clocks_mhz: counted device clock over each iteration of the last `periods`, shape (count,),
            NaN where unknown; None without a counter.
        gaps_ns: reading time before each iteration, shape (count,); None without a counter.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.counter: Counter | None = None
        self.clocks_mhz: np.ndarray | None = None
        self.gaps_ns: np.ndarray | None = None
        self._clock = clock or HostClock()
        self._events: list[Any] = []
        self.typical_ns = 0.0
        self._device_ns = self._host_ns = 0

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return CUDA-event periods and host enqueue times (without queue waits) in ns."""
        import torch

        self.clocks_mhz = self.gaps_ns = None
        ends = self._boundary_events(count + 1)
        host = np.empty(count, dtype=np.int64)
        # Looked up once: a look-up per record costs a microsecond.
        stream = torch.cuda.current_stream()
        # On an empty queue the first event completes at once, so both clocks start together.
        stream.synchronize()
        readings = _Readings(self.counter, stream, count, self.typical_ns)
        begun, in_flight = self._clock.now_ns(), IN_FLIGHT
        ends[0].record(stream)
        starts = [readings.after(ends[0], 0)]
        for i in range(count):
            if i >= in_flight:
                ends[i - in_flight + 1].synchronize()
            if in_flight == IN_FLIGHT and i >= 2 * IN_FLIGHT and i.bit_count() == 1:
                first = max(1, i - 4)
                lately = _elapsed_ns(starts[first : i - 1], ends[first + 1 : i])
                in_flight = may_be_in_flight(float(np.median(lately)), host[1:i])
            start = self._clock.now_ns()
            try:
                step()
            except Exception as error:
                raise StepError(_elapsed_ns(starts[:i], ends[1 : i + 1]), host[:i]) from error
            host[i] = self._clock.now_ns() - start
            ends[i + 1].record(stream)
            starts.append(readings.after(ends[i + 1], i + 1))
        ends[count].synchronize()
        self._host_ns += self._clock.now_ns() - begun
        self._device_ns += int(_elapsed_ns(ends[:1], ends[count:]).sum())
        elapsed = _elapsed_ns(starts[:count], ends[1:])
        if self.counter is not None and count:
            self.typical_ns = float(np.median(elapsed))
            self.clocks_mhz = readings.clocks_mhz()
            self.gaps_ns = _elapsed_ns(ends[:count], starts[:count])
        return elapsed, host

    def latencies(self, step: Step, count: int) -> np.ndarray:
        """Return the time from call to result in ns, with the queue empty before and after."""
        import torch

        stream = torch.cuda.current_stream()
        stream.synchronize()
        samples = np.empty(count, dtype=np.int64)
        for i in range(count):
            start = self._clock.now_ns()
            try:
                step()
                stream.synchronize()
            except Exception as error:
                raise StepError(samples[:i], samples[:i]) from error
            samples[i] = self._clock.now_ns() - start
        return samples

    def clock_difference(self) -> float | None:
        """Return the ratio of all measured time by CUDA events and by host clock, minus one."""
        return self._device_ns / self._host_ns - 1 if self._host_ns >= COMPARABLE_NS else None

    def _boundary_events(self, count: int) -> list[Any]:
        import torch

        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        return self._events[:count]


class _Readings:
    """Cycle counter readings during one call of `CudaSampler.periods`.

    Args:
        counter: the counter, or None.
        stream: the stream of the iterations.
        count: number of iterations.
        typical_ns: approximate step time; 0 if unknown.
    """

    def __init__(self, counter: Counter | None, stream: Any, count: int, typical_ns: float) -> None:
        self._counter, self._stream, self._count = counter, stream, count
        self._stride = math.ceil(READ_CYCLES_NS / max(typical_ns, 1.0)) if typical_ns else 1
        self._at: list[int] = []

    def after(self, end: Any, place: int) -> Any:
        """Read the counter if due; return the event at which the next iteration starts."""
        if self._counter is None:
            return end
        import torch

        due = not self._at or place == self._count or place >= self._at[-1] + self._stride
        if not due:
            return end
        if not self._counter.read(len(self._at), self._stream.cuda_stream):
            return end
        self._at.append(place)
        start = torch.cuda.Event(enable_timing=True)
        start.record(self._stream)
        return start

    def clocks_mhz(self) -> np.ndarray | None:
        """Return the device clock during each iteration; None with fewer than two readings."""
        if self._counter is None or len(self._at) < 2:
            return None
        found = np.full(self._count, np.nan)
        between = self._counter.clocks_mhz(len(self._at))
        found[self._at[0] : self._at[-1]] = np.repeat(between, np.diff(self._at))
        return found


def may_be_in_flight(period_ns: float, host_ns: np.ndarray) -> int:
    """Return the number of iterations to keep in flight, the running one included.

    Args:
        period_ns: typical period of an iteration.
        host_ns: enqueue times of some iterations, shape (N,).
    """
    most = min(LEAD_NS / max(period_ns, 1.0), BACKLOG_NS / max(float(np.min(host_ns)), 1.0))
    return int(np.clip(most, IN_FLIGHT, MOST_IN_FLIGHT))


def _elapsed_ns(starts: list[Any], ends: list[Any]) -> np.ndarray:
    """Wait for the last event; return the elapsed time of each pair, none if the device failed."""
    try:
        for last in ends[-1:]:
            last.synchronize()
        elapsed = [start.elapsed_time(end) * 1e6 for start, end in zip(starts, ends, strict=True)]
    except RuntimeError:  # the step's error took the device down
        elapsed = []
    return np.asarray(elapsed, dtype=np.float64).round().astype(np.int64)


def sampler_for(device_type: str, clock: Clock | None = None) -> Sampler:
    """Return the sampler for a device type, `cpu` or `cuda`."""
    return CudaSampler(clock) if device_type == "cuda" else HostSampler(clock)


def warm_up(
    step: Step,
    sampler: Sampler,
    *,
    min_calls: int = 3,
    min_ns: int = 500_000_000,
    max_calls: int = 2000,
) -> WarmUp:
    """Call the step at least `min_calls` times and for `min_ns` after the first call.

    The first call is reported separately, so that compilation does not use up `min_ns`.
    """
    first = int(sampler.latencies(step, 1)[0])
    later: list[int] = []
    while len(later) + 1 < max_calls and (len(later) + 1 < min_calls or sum(later) < min_ns):
        later.append(int(sampler.latencies(step, 1)[0]))
    typical = int(np.median(later))
    group = -(-GROUPING_BELOW_NS // max(typical, 1)) if typical < GROUPING_BELOW_NS else 1
    return WarmUp(first, len(later) + 1, typical, group)


def grouped(step: Step, group: int) -> Step:
    """Return a step that runs `group` iterations; divide its times by `group`."""
    if group == 1:
        return step

    def several() -> None:
        for _ in range(group):
            step()

    return several
