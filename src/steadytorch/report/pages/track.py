"""The HTML page of tracked series: the changes, a chart per series, and all results."""

from __future__ import annotations

from typing import Any

from steadytorch.report import track
from steadytorch.report.plots import BLUE, GREEN, RED, Plot, Table, figure, lines_at, table, thinned
from steadytorch.report.text import unit_of
from steadytorch.results.saved import Saved
from steadytorch.results.track import TrackResult, TrackSeries

_MOST_DRAWN = 40
"""Most series with a chart: more make pages slow."""


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of tracked series."""
    document: TrackResult = saved.result
    return {
        "title": saved.head.workload,
        "headline": track.headline(document),
        "basis": track.basis(document),
        "changes": _changes(document),
        "pictures": [_chart(series) for series in document.series[:_MOST_DRAWN]],
        "points": _points(document),
    }


def _changes(document: TrackResult) -> Table:
    rows = [
        (series.workload, series.machine, track.format_change(series, change))
        for series in document.series
        for change in series.changes
    ]
    return table(["workload", "machine", "change"], rows, (0, 1, 2))


def _points(document: TrackResult) -> Table:
    rows = [
        (series.workload, point.label, point.created, track.format_value(series, point.value))
        for series in document.series
        for point in series.points
    ]
    return table(["workload", "result", "taken", "value"], rows, (0, 1, 2))


def _chart(series: TrackSeries) -> Plot:
    values = [point.value for point in series.points]
    unit, scale = ("", 1.0) if series.unit == "ratio" else unit_of(values[-1])
    kept = thinned(values)
    bars = [series.points[i] for i in kept]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [i + 1 for i in kept],
            "y": [values[i] / scale for i in kept],
            "text": [point.label for point in bars],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [0 if p.high is None else (p.high - p.value) / scale for p in bars],
                "arrayminus": [0 if p.low is None else (p.value - p.low) / scale for p in bars],
                "thickness": 1,
                "width": 2,
            },
            "line": {"color": BLUE, "width": 1},
            "marker": {"color": BLUE, "size": 6},
            "showlegend": False,
            "hovertemplate": f"%{{text}}: %{{y:.5g}} {unit}<extra></extra>",
        }
    ]
    marks = []
    for change in series.changes:
        size = change.effect.estimate or 0.0
        colour = RED if size > 0 else GREEN
        marks.append((change.index + 0.5, f"{100 * size:+.1f} %", colour, "dash"))
    axis = f"time over {series.base}" if series.unit == "ratio" else f"{series.metric}, {unit}"
    shape = figure(data, "result, oldest first", axis, layout=lines_at(marks))
    return Plot(track.title(series), shape, "Dashed: changes. Bars: intervals of single results.")
