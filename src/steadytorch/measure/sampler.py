"""Timing one iteration after another, on the CPU and on CUDA devices.

Two times are taken, never in one block, because synchronising changes the workload:

- *period*: from the end of an iteration to the end of the next, with the device's queue kept filled
  (two iterations in flight at the least, `LEAD_NS` of them where the driver's queue has room). Gaps
  count, so launch-bound work is seen as it is.
- *latency*: from the call to its finished result, with the queue empty before and after.

On the CPU, where a call returns with its result, the two are one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import numpy as np

from steadytorch.measure.clock import Clock, HostClock

GROUPING_BELOW_NS = 100_000
"""Below 100 us an iteration, several are timed together: CUDA events resolve 0.5 us."""

IN_FLIGHT, MOST_IN_FLIGHT = 2, 64
"""Iterations that wait in the device's queue or run, at the least and at the most."""
LEAD_NS = 4_000_000
"""Work to have in the queue where calls are short: Linux may keep a process waiting for a slice of
3 ms, and what runs on without waiting for each result does not notice."""
BACKLOG_NS = 1_000_000
"""Enqueueing to be ahead by: half of the 1,022 launches that the driver queues, at 2 us each.
Where it is full, launching waits, and work that the device bounds looks launch-bound."""

COMPARABLE_NS = 100_000_000
"""The host hears of a block's end some 20 us late: two in ten thousand of this."""
CLOCKS_AGREE = 1e-3
"""Clocks of device and host that differ by more than this fraction make periods doubtful."""

Step = Callable[[], Any]


class StepError(Exception):
    """The step raised. The times of the iterations before it are kept; the cause is chained.

    Attributes:
        durations_ns: of the finished iterations, shape (finished,).
        host_ns: likewise.
    """

    def __init__(self, durations_ns: np.ndarray, host_ns: np.ndarray) -> None:
        super().__init__(f"the step raised in iteration {len(durations_ns)}")
        self.durations_ns, self.host_ns = durations_ns, host_ns


class Sampler(Protocol):
    """Times iterations of a step on one kind of device.

    Both methods raise `StepError` where the step raises.
    """

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Period and host enqueue time of `count` iterations, both in ns, shape (count,)."""
        ...

    def latencies(self, step: Step, count: int) -> np.ndarray:
        """Synchronised latency of `count` iterations in ns, shape (count,)."""
        ...

    def clock_difference(self) -> float | None:
        """All periods by the device's clock over the same by the host's, less one.

        None where there is one clock only, or where less than `COMPARABLE_NS` was timed.
        """
        ...


class HostSampler:
    """Times steps that are finished when they return.

    Args:
        clock: where the time comes from.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Period and host time of `count` iterations in ns; gaps between iterations count."""
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
        """The same as the period: a host call returns with its result."""
        return self.periods(step, count)[0]

    def clock_difference(self) -> None:
        """There is one clock only."""


class CudaSampler:
    """Times steps that enqueue work on the current CUDA stream.

    Args:
        clock: the host's clock, for enqueue time and latency.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()
        self._events: list[Any] = []
        self._device_ns = self._host_ns = 0

    def periods(self, step: Step, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Period by boundary events and host enqueue time, in ns; waiting is not enqueueing."""
        import torch

        events = self._boundary_events(count + 1)
        host = np.empty(count, dtype=np.int64)
        # Looked up once: at every record it would cost a microsecond.
        stream = torch.cuda.current_stream()
        # With an empty queue the first event passes when it is recorded: both clocks start there.
        stream.synchronize()
        begun, in_flight = self._clock.now_ns(), IN_FLIGHT
        events[0].record(stream)
        for i in range(count):
            if i >= in_flight:
                events[i - in_flight + 1].synchronize()
            if in_flight == IN_FLIGHT and i >= 2 * IN_FLIGHT and i.bit_count() == 1:
                lately = _elapsed_ns(events[max(1, i - 4) : i])
                in_flight = may_be_in_flight(float(np.median(lately)), host[1:i])
            start = self._clock.now_ns()
            try:
                step()
            except Exception as error:
                raise StepError(_elapsed_ns(events[: i + 1]), host[:i]) from error
            host[i] = self._clock.now_ns() - start
            events[i + 1].record(stream)
        events[count].synchronize()
        self._host_ns += self._clock.now_ns() - begun
        elapsed = _elapsed_ns(events[: count + 1])
        self._device_ns += int(elapsed.sum())
        return elapsed, host

    def latencies(self, step: Step, count: int) -> np.ndarray:
        """From the call to the finished result in ns, the queue empty before and after."""
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
        """All periods by the device's clock over the same by the host's, less one."""
        return self._device_ns / self._host_ns - 1 if self._host_ns >= COMPARABLE_NS else None

    def _boundary_events(self, count: int) -> list[Any]:
        import torch

        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        return self._events[:count]


def may_be_in_flight(period_ns: float, host_ns: np.ndarray) -> int:
    """Iterations that may be in a device's queue at once, the one that runs included.

    Args:
        period_ns: of one iteration, typically.
        host_ns: enqueue times of some, shape (N,).
    """
    most = min(LEAD_NS / max(period_ns, 1.0), BACKLOG_NS / max(float(np.min(host_ns)), 1.0))
    return int(np.clip(most, IN_FLIGHT, MOST_IN_FLIGHT))


def _elapsed_ns(events: list[Any]) -> np.ndarray:
    """Times between neighbouring events once the last has passed; none where a fault broke them."""
    try:
        events[-1].synchronize()
        elapsed = [first.elapsed_time(second) * 1e6 for first, second in pairwise(events)]
    except RuntimeError:  # the device is lost with the step that raised
        elapsed = []
    return np.asarray(elapsed, dtype=np.float64).round().astype(np.int64)


def sampler_for(device_type: str, clock: Clock | None = None) -> Sampler:
    """The sampler for a device type, `cpu` or `cuda`."""
    return CudaSampler(clock) if device_type == "cuda" else HostSampler(clock)


class WarmUp(msgspec.Struct, frozen=True):
    """How a step was brought to speed.

    Attributes:
        first_call_ns: synchronised latency of the very first call, where compilers do their work.
        calls: how many calls were made in all.
        iteration_ns: their median latency without the first, a first idea of the scale.
        group: iterations to time together so that a sample is not below the clock's resolution.
    """

    first_call_ns: int
    calls: int
    iteration_ns: int
    group: int


def warm_up(
    step: Step,
    sampler: Sampler,
    *,
    min_calls: int = 3,
    min_ns: int = 500_000_000,
    max_calls: int = 2000,
) -> WarmUp:
    """Calls the step at least `min_calls` times and for `min_ns` after the first call.

    The first call is kept apart, because compilation would otherwise count as warming up.
    """
    first = int(sampler.latencies(step, 1)[0])
    later: list[int] = []
    while len(later) + 1 < max_calls and (len(later) + 1 < min_calls or sum(later) < min_ns):
        later.append(int(sampler.latencies(step, 1)[0]))
    typical = int(np.median(later))
    group = -(-GROUPING_BELOW_NS // max(typical, 1)) if typical < GROUPING_BELOW_NS else 1
    return WarmUp(first, len(later) + 1, typical, group)


def grouped(step: Step, group: int) -> Step:
    """A step of `group` iterations; divide its times by `group`."""
    if group == 1:
        return step

    def several() -> None:
        for _ in range(group):
            step()

    return several
