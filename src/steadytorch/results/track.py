"""Benchmark results over commits: series, and the changes detected in them."""

from __future__ import annotations

import msgspec

from steadytorch.results.compare import Interval
from steadytorch.results.shown import Shown


class TrackPoint(msgspec.Struct, frozen=True):
    """One benchmark result of a series.

    Attributes:
        label: short hash of the commit, or name of the file.
        created: time at which the result was written, ISO 8601.
        value: median time in ns, or time over the base's, by the series' `unit`.
        low: lower end of its interval; None if there is none.
        high: upper end; None likewise.
        source: file that it comes from.
    """

    label: str
    created: str
    value: float
    low: float | None
    high: float | None
    source: str


class TrackChange(msgspec.Struct, frozen=True):
    """A detected change of the level of a series.

    Attributes:
        index: index of the first point at the new level.
        found: index of the point with which the change was established.
        effect: change of time as a fraction, with its 99 % interval.
        earliest: lowest index that the data allow in place of `index`.
        latest: highest such index.
    """

    index: int
    found: int
    effect: Interval
    earliest: int
    latest: int


class TrackSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one workload on one machine, oldest first.

    Attributes:
        workload: its name.
        machine: device, its name and its number of cores.
        metric: `latency` or `period`.
        unit: `ns`, or `ratio` for times over those of one base revision.
        base: the base of a `ratio`; empty otherwise.
        points: oldest first.
        changes: in order; empty if the level never changed detectably.
    """

    workload: str
    machine: str
    metric: str
    unit: str
    base: str
    points: tuple[TrackPoint, ...]
    changes: tuple[TrackChange, ...]


class TrackResult(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """Series of benchmark results, with the changes detected in them.

    Attributes:
        alpha: probability of any false change in a series.
        series: by workload and machine.
        notes: files that were left out, and why.
    """

    alpha: float
    series: tuple[TrackSeries, ...]
    notes: tuple[str, ...] = ()

    @property
    def workload(self) -> str:
        """All workload names, comma-separated, as the title of a saved result."""
        return ", ".join(dict.fromkeys(each.workload for each in self.series))
