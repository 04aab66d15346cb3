"""A worker's timing samples, with the telemetry recorded during sampling."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from steadytorch.device.recording import Recording
from steadytorch.measure.causes import attribute
from steadytorch.measure.measurement import Measurement, summarize


class Series(msgspec.Struct, frozen=True):
    """Iterations timed one after another, with their telemetry.

    Attributes:
        durations_ns: time of each iteration, in the order taken.
        stretches: runs of samples without a break, as (host clock at the start, sample count).
        host_ns: time to enqueue each iteration; empty for latencies.
        overhead_ns: time the probe adds to an iteration, measured on an empty step.
        group: iterations timed together; durations are their means.
        resolved: whether the median's interval became narrow enough in time.
        recording: telemetry on the same clock, as `device.recorder.Recording`.
        failed: the exception that ended the series early, or None.
        stopped: whether the series was stopped early on request.
        clock_difference: see `Sampler.clock_difference`.
        clocks_mhz: see `CudaSampler.clocks_mhz`; None if cycles were not counted.
        gaps_ns: see `CudaSampler.gaps_ns`; None if cycles were not counted.
    """

    durations_ns: list[int]
    stretches: list[tuple[int, int]]
    host_ns: list[int]
    overhead_ns: float
    group: int
    resolved: bool
    recording: Any
    failed: str | None = None
    stopped: bool = False
    clock_difference: float | None = None
    clocks_mhz: list[float] | None = None
    gaps_ns: list[int] | None = None

    def starts_ns(self) -> np.ndarray:
        """Start times of the samples in ns on the host's clock, shape (samples,)."""
        durations = np.asarray(self.durations_ns, dtype=np.int64) * self.group
        starts, first = np.empty_like(durations), 0
        for at_ns, count in self.stretches:
            after = np.cumsum(durations[first : first + count])
            starts[first : first + count] = at_ns + np.concatenate([[0], after])[:count]
            if self.gaps_ns is not None:
                starts[first : first + count] += np.cumsum(self.gaps_ns[first : first + count])
            first += count
        return starts

    def summary(self, metric: str) -> Measurement:
        """Statistics of the samples, with the recorded causes of outliers.

        Raises:
            UsageError: there are no samples.
        """
        plain = summarize(self.durations_ns, metric)
        if not plain.outliers:
            return plain
        durations = np.asarray(self.durations_ns, dtype=np.int64)
        places = [outlier.index for outlier in plain.outliers]
        host = np.asarray(self.host_ns, dtype=np.int64) if self.host_ns else None
        recording = msgspec.convert(self.recording, Recording)
        causes = attribute(
            self.starts_ns(),
            durations,
            places,
            recording,
            host,
            group=self.group,
            clocks_mhz=self.clocks_mhz,
        )
        found = dict(zip(places, causes, strict=True))
        return summarize(self.durations_ns, metric, causes=found)
