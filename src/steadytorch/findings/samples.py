"""The unprofiled samples of a case, joined with what was recorded of the machine meanwhile."""

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

RECORD = "run `steady explain WORKLOAD`: it times the workload and records the machine beside it"
"""The recipe for whatever lacks a recording."""


@dataclass(frozen=True, eq=False)
class Samples:
    """The steady part of a series. Times are ns on the clock of the recording.

    Attributes:
        durations_ns: of one sample, which is the time of `group` iterations, float64, (samples,).
        starts_ns: when each began, int64, (samples,).
        host_ns: what the host took to enqueue each, float64, (samples,); empty for latencies.
        group: iterations to a sample.
        outliers: samples that stand out, with the cause that was seen; `index` counts from here.
        recording: what was recorded.
        clocks_mhz: of the GPU over each sample by its counter of cycles, float64, (samples,), NaN
            where unknown; None where none was counted.
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
        """Of a sample."""
        return float(np.median(self.durations_ns))

    @property
    def steps(self) -> int:
        """Iterations in all samples."""
        return len(self.durations_ns) * self.group

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU did the work."""
        return self.recording.device != "cpu"

    @property
    def host_bound(self) -> bool:
        """Whether a delay of the host delays the step.

        So it is on the CPU and for synchronised latencies. Of periods on a GPU it is where
        enqueueing takes most of the period: otherwise the host is ahead and has time to spare.
        """
        if not len(self.host_ns):
            return True
        return float(np.median(self.host_ns)) >= 0.8 * self.median_ns

    def caused_by(self, *causes: str) -> np.ndarray:
        """Places of the slow outliers with one of these causes."""
        median = self.median_ns
        return np.asarray(
            [o.index for o in self.outliers if o.cause in causes and o.sample_ns > median],
            dtype=np.int64,
        )

    def excess_ns(self, places: np.ndarray) -> float:
        """What these samples took beyond the median, per iteration of the whole series."""
        beyond = self.durations_ns[places] - self.median_ns
        return float(beyond.clip(min=0).sum()) / self.steps

    def variance_share(self, places: np.ndarray) -> float | None:
        """Of the squared distances from the median, those of these samples; None for none."""
        squares = (self.durations_ns - self.median_ns) ** 2
        total = float(squares.sum())
        return float(squares[places].sum()) / total if total and len(places) else None

    def column(self, channel: str) -> np.ndarray | None:
        """A channel at all ticks, int64, (ticks,); None where it was not recorded."""
        values = getattr(self.recording, channel)
        return np.asarray(values, dtype=np.int64) if values else None

    def level(self, channel: str) -> np.ndarray | None:
        """How a channel stood at the end of each sample, int64, (samples,)."""
        column = self.column(channel)
        if column is None:
            return None
        ends = self.starts_ns + self.durations_ns.astype(np.int64)
        latest = np.searchsorted(self.recording.at_ns, ends, side="right") - 1
        return column[latest.clip(min=0)]

    def rises(self, channel: str) -> np.ndarray | None:
        """What a counter rose by from tick to tick while steady, int64; None if unrecorded."""
        column = self.column(channel)
        if column is None:
            return None
        first, last = self._ticks()
        return np.diff(column[first : last + 1]).clip(min=0)

    def rise(self, channel: str) -> int | None:
        """What a counter rose by while steady; None where it was not recorded."""
        rises = self.rises(channel)
        return None if rises is None else int(rises.sum())

    def rate(self, channel: str) -> float | None:
        """What a counter rose by per ns while steady; None where it was not recorded.

        Of the time between the same ticks: on a busy machine these may lie far outside the samples.
        """
        rise = self.rise(channel)
        if rise is None:
            return None
        first, last = self._ticks()
        elapsed = self.recording.at_ns[last] - self.recording.at_ns[first]
        return rise / elapsed if elapsed else 0.0

    def _ticks(self) -> tuple[int, int]:
        """The last tick before the steady part, and the first after it where there is one."""
        at = np.asarray(self.recording.at_ns, dtype=np.int64)
        end = self.starts_ns[-1] + int(self.durations_ns[-1])
        first = max(0, int(np.searchsorted(at, self.starts_ns[0], side="right")) - 1)
        return first, min(int(np.searchsorted(at, end, side="left")), len(at) - 1)

    @property
    def elapsed_ns(self) -> int:
        """From the first steady sample's start to the last one's end."""
        return int(self.starts_ns[-1] - self.starts_ns[0]) + int(self.durations_ns[-1])


@lru_cache(maxsize=1)
def samples_of(case: Case) -> Samples | None:
    """The samples of a case after their warm-up; None without any, or without a recording.

    Outliers and their causes are found as `steady measure` finds them.
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
    """Why a rule cannot tell that needs a channel of the recording.

    Args:
        rule: its name.
        samples: of the case, None where there are none.
        channel: the channel that it needs.
        what: the channel in words.
    """
    if samples is None:
        return Abstention(rule, f"{what} was not recorded: there is no unprofiled run", RECORD)
    reason = samples.recording.unknown.get(channel, "the recording is empty")
    return Abstention(
        rule,
        f"{what} was not recorded: {reason}",
        "run `steady explain WORKLOAD` where `steady doctor` shows it as observable",
    )
