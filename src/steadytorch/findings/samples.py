"""Unprofiled timing samples of a case, joined with the telemetry of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from steadytorch.device.recording import Recording
from steadytorch.findings.finding import Abstention, Case
from steadytorch.measure.causes import attribute
from steadytorch.measure.variability import Outlier, find_outliers
from steadytorch.measure.warmup import steady_part

RECORD = "run `steady explain WORKLOAD`, which times the workload and records the machine"
"""Advice of rules that lack a recording."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Timing samples of a series after warm-up. Times are in ns, on the clock of `recording`.

    Attributes:
        durations_ns: time of each sample, which is `group` iterations, float64, (samples,).
        starts_ns: start of each, int64, (samples,).
        host_ns: host time to enqueue each, float64, (samples,); empty for latencies.
        group: iterations per sample.
        outliers: outliers with their observed cause; `index` counts within this part.
        recording: the recording of the machine.
        clocks_mhz: GPU clock over each sample from the cycle counter, float64, (samples,), NaN
            where unknown; None if not counted.
    """

    durations_ns: np.ndarray
    starts_ns: np.ndarray
    host_ns: np.ndarray
    group: int
    outliers: tuple[Outlier, ...]
    recording: Recording
    clocks_mhz: np.ndarray | None = None

    @property
    def median_ns(self) -> float:
        """Median time of a sample."""
        return float(np.median(self.durations_ns))

    @property
    def steps(self) -> int:
        """Number of iterations in all samples."""
        return len(self.durations_ns) * self.group

    @property
    def on_gpu(self) -> bool:
        """Whether the work ran on a GPU."""
        return self.recording.device != "cpu"

    @property
    def host_bound(self) -> bool:
        """Whether a delay of the host delays the step.

        True for work on a CPU, and for latencies, which are synchronised. For periods on a GPU,
        true if enqueueing takes at least 80 % of the period: the host then hardly runs ahead.
        """
        if not len(self.host_ns):
            return True
        return float(np.median(self.host_ns)) >= 0.8 * self.median_ns

    def caused_by(self, *causes: str) -> np.ndarray:
        """Indices of the slow outliers that have one of the given causes."""
        median = self.median_ns
        return np.asarray(
            [o.index for o in self.outliers if o.cause in causes and o.sample_ns > median],
            dtype=np.int64,
        )

    def excess_ns(self, places: np.ndarray) -> float:
        """Time of the given samples beyond the median, in ns per iteration of the whole series."""
        beyond = self.durations_ns[places] - self.median_ns
        return float(beyond.clip(min=0).sum()) / self.steps

    def variance_share(self, places: np.ndarray) -> float | None:
        """Share of the given samples in the variance about the median; None if undefined."""
        squares = (self.durations_ns - self.median_ns) ** 2
        total = float(squares.sum())
        return float(squares[places].sum()) / total if total and len(places) else None

    def column(self, channel: str) -> np.ndarray | None:
        """Values of a channel at all ticks, int64, shape (ticks,); None if not recorded."""
        values = getattr(self.recording, channel)
        return np.asarray(values, dtype=np.int64) if values else None

    def level(self, channel: str) -> np.ndarray | None:
        """Value of a channel at the end of each sample, int64, (samples,); None if not recorded."""
        column = self.column(channel)
        if column is None:
            return None
        ends = self.starts_ns + self.durations_ns.astype(np.int64)
        latest = np.searchsorted(self.recording.at_ns, ends, side="right") - 1
        return column[latest.clip(min=0)]

    def rises(self, channel: str) -> np.ndarray | None:
        """Increases of a counter from tick to tick after warm-up, int64; None if not recorded."""
        column = self.column(channel)
        if column is None:
            return None
        first, last = self._ticks()
        return np.diff(column[first : last + 1]).clip(min=0)

    def rise(self, channel: str) -> int | None:
        """Total increase of a counter after warm-up; None if not recorded."""
        rises = self.rises(channel)
        return None if rises is None else int(rises.sum())

    def rate(self, channel: str) -> float | None:
        """Increase of a counter per ns after warm-up; None if not recorded.

        Counter and elapsed time are taken at the same ticks, which may lie far outside the samples
        on a busy machine.
        """
        rise = self.rise(channel)
        if rise is None:
            return None
        first, last = self._ticks()
        elapsed = self.recording.at_ns[last] - self.recording.at_ns[first]
        return rise / elapsed if elapsed else 0.0

    def _ticks(self) -> tuple[int, int]:
        """Indices of the last tick before the steady samples and of the first tick after them."""
        at = np.asarray(self.recording.at_ns, dtype=np.int64)
        end = self.starts_ns[-1] + int(self.durations_ns[-1])
        first = max(0, int(np.searchsorted(at, self.starts_ns[0], side="right")) - 1)
        return first, min(int(np.searchsorted(at, end, side="left")), len(at) - 1)

    @property
    def elapsed_ns(self) -> int:
        """Time from the start of the first steady sample to the end of the last."""
        return int(self.starts_ns[-1] - self.starts_ns[0]) + int(self.durations_ns[-1])


@lru_cache(maxsize=1)
def samples_of(case: Case) -> Samples | None:
    """Timing samples of a case after warm-up; None without samples or without telemetry.

    Outliers and their causes are found as in `steady measure`.
    """
    series = case.series
    if series is None or not series.durations_ns or series.recording is None:
        return None
    recording = series.recording
    if not isinstance(recording, Recording):
        recording = msgspec.convert(recording, Recording)
    every = np.asarray(series.durations_ns, dtype=np.float64)
    first = steady_part(every).dropped
    durations, starts = every[first:], series.starts_ns()[first:]
    host = np.asarray(series.host_ns or (), dtype=np.float64)[first:]
    found = find_outliers(durations)
    places = [outlier.index for outlier in found]
    counted = None if series.clocks_mhz is None else np.asarray(series.clocks_mhz)[first:]
    causes = attribute(
        starts, durations, places, recording, host, group=series.group, clocks_mhz=counted
    )
    whole = durations * series.group
    outliers = tuple(
        Outlier(place, int(whole[place]), cause)
        for place, cause in zip(places, causes, strict=True)
    )
    return Samples(whole, starts, host * series.group, series.group, outliers, recording, counted)


def unrecorded(rule: str, samples: Samples | None, channel: str, what: str) -> Abstention:
    """Abstention of a rule that needs a telemetry channel that was not recorded.

    Args:
        rule: name of the rule.
        samples: samples of the case, None if there are none.
        channel: the missing channel.
        what: the channel as a noun, for the message.
    """
    if samples is None:
        return Abstention(rule, f"{what} was not recorded: there is no unprofiled run", RECORD)
    reason = samples.recording.unknown.get(channel, "the recording is empty")
    return Abstention(
        rule,
        f"{what} was not recorded: {reason}",
        "run `steady explain WORKLOAD` on a machine where `steady doctor` shows it as observable",
    )
