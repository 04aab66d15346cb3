"""Detects changes of level in series of saved results over commits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from steadytorch.errors import UsageError
from steadytorch.measure.changes import ALPHA, find_changes
from steadytorch.results.compare import Interval
from steadytorch.results.gate import GateResult
from steadytorch.results.machine import DeviceFacts
from steadytorch.results.measure import MeasureResult
from steadytorch.results.saved import Saved, content_of, decode, kind_of, named
from steadytorch.results.track import TrackChange, TrackPoint, TrackResult, TrackSeries

KINDS = ("gate", "measure")
_MOST_FILES = 100_000


class _Key(NamedTuple):
    """Properties that all points of one series share."""

    workload: str
    machine: str
    metric: str
    kind: str


class _Taken(NamedTuple):
    """A point of a series, with its ratio to the base revision if it comes from a gate."""

    point: TrackPoint
    base: str = ""
    ratio: Interval | None = None


def track(paths: Sequence[str | Path]) -> TrackResult:
    """Finds changes of level in results of `steady gate --json` and `steady measure --json`.

    Results are ordered by the time at which they were written. Results of one workload on one kind
    of machine form a series. A series of gates against one base revision holds ratios to the base,
    which cancels machine drift. With several base revisions, the series holds the times of the head
    revisions instead.

    Args:
        paths: files, and folders whose `*.json` files are read.

    Returns:
        The series with their changes; at most 1 % of series without a change show one.

    Raises:
        UsageError: a file cannot be read or has another kind, or there is no result at all.
    """
    return track_files(paths)[0]


def track_files(paths: Sequence[str | Path]) -> tuple[TrackResult, DeviceFacts]:
    """Does what `track` does, and also returns the machine of the newest result.

    Raises:
        UsageError: a file cannot be read or has another kind, or there is no result at all.
    """
    notes: list[str] = []
    read: dict[Path, Saved] = {}
    for path, is_listed in _files(paths):
        try:
            read[path] = _read(path)
        except UsageError as error:
            if not is_listed:
                raise
            notes.append(f"left out: {error}")
    if not read:
        shown = ", ".join(str(path) for path in paths)
        raise UsageError(f"{shown}: no result of steady gate or steady measure found")
    ordered = sorted(read.items(), key=lambda item: (item[1].head.created, str(item[0])))
    rows: dict[_Key, list[_Taken]] = defaultdict(list)
    for path, saved in ordered:
        for key, taken in _points(path, saved):
            rows[key].append(taken)
    series = tuple(_series(key, taken) for key, taken in sorted(rows.items()))
    result = TrackResult(alpha=ALPHA, series=series, notes=tuple(notes))
    return result, ordered[-1][1].head.environment


def _files(paths: Sequence[str | Path]) -> list[tuple[Path, bool]]:
    """Lists all files without duplicates, and whether each was found in a folder."""
    found: dict[Path, bool] = {}
    for path in map(Path, paths):
        listed = sorted(path.glob("*.json")) if path.is_dir() else [path]
        for each in listed:
            found.setdefault(each.resolve(), path.is_dir())
    if len(found) > _MOST_FILES:
        raise UsageError(f"{len(found):,} files are too many: pass {_MOST_FILES:,} at most")
    return list(found.items())


def _read(path: Path) -> Saved:
    content = content_of(path)
    kind = kind_of(path, content)
    if kind not in KINDS:
        raise UsageError(
            f"{named(path)} holds a {kind!r} result: pass those of steady gate and steady measure"
        )
    return decode(path, content, kind)


def _points(path: Path, saved: Saved) -> list[tuple[_Key, _Taken]]:
    facts = saved.head.environment
    machine = f"{facts.device}, {facts.name or 'unknown'}, {facts.cores_logical} logical cores"
    created, source = saved.head.created, str(path)
    if isinstance(saved.result, MeasureResult):
        measured = saved.result
        ends = measured.median_ci_ns or (None, None)
        point = TrackPoint(path.stem, created, measured.median_ns, *ends, source)
        key = _Key(saved.head.workload, machine, measured.metric, saved.kind)
        return [(key, _Taken(point))] if _usable(measured.median_ns) else []
    gate: GateResult = saved.result
    label = gate.head.commit[:8] + ("+" if gate.head.changed else "")
    found = []
    for row in gate.rows:
        effect, time = row.interval, row.head_median_ns
        if effect is None or effect.estimate is None or time is None or not _usable(time):
            continue
        point = TrackPoint(label, created, time, None, None, source)
        key = _Key(row.workload, machine, gate.metric, saved.kind)
        found.append((key, _Taken(point, gate.base.commit, effect)))
    return found


def _usable(time_ns: float) -> bool:
    return 0 < time_ns < math.inf


def _series(key: _Key, taken: Sequence[_Taken]) -> TrackSeries:
    bases = {each.base for each in taken}
    points = [each.point for each in taken]
    is_relative = key.kind == "gate" and len(bases) == 1
    if is_relative:
        points = [_over_base(each) for each in taken]
    changes = find_changes([math.log(point.value) for point in points])
    return TrackSeries(
        workload=key.workload,
        machine=key.machine,
        metric=key.metric,
        unit="ratio" if is_relative else "ns",
        base=bases.pop()[:12] if is_relative else "",
        points=tuple(points),
        changes=tuple(
            TrackChange(
                index=change.index,
                found=change.found,
                effect=Interval(
                    math.expm1(change.estimate), math.expm1(change.low), math.expm1(change.high)
                ),
                earliest=change.earliest,
                latest=change.latest,
            )
            for change in changes
        ),
    )


def _over_base(taken: _Taken) -> TrackPoint:
    point, ratio = taken.point, taken.ratio
    assert ratio is not None
    assert ratio.estimate is not None
    low, high = (None if end is None else 1 + end for end in (ratio.low, ratio.high))
    return TrackPoint(point.label, point.created, 1 + ratio.estimate, low, high, point.source)
