"""Pictures of series of samples, which several pages show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from steadytorch.measure.measurement import Measurement
from steadytorch.report.plots import (
    BLUE,
    GREEN,
    GREY,
    MOST_POINTS,
    ORANGE,
    PURPLE,
    Plot,
    figure,
    lines_at,
    thinned,
    thinning_told,
)
from steadytorch.report.text import duration, unit_of

_BINS = 60
_WIDE = 4.0
"""From this ratio of the slowest sample to the fastest a linear axis would flatten the rest."""
_CAUSES = (ORANGE, "#c53d3d", PURPLE, GREEN, "#c85a9a", "#8a5a44", "#1f9aa8", "#a8a12b")


def timeline(series: Sequence[Measurement], names: Sequence[str], title: str = "") -> Plot:
    """All series one after another, warm-up and outliers marked; outliers coloured by cause."""
    unit, unit_ns = unit_of(series[0].median_ns)
    starts = list(accumulate((len(each.samples_ns) for each in series), initial=0))
    data, drawn, low, high = [], 0, float("inf"), 0.0
    causes: dict[str, tuple[list[int], list[float]]] = {}
    shared = max(2, MOST_POINTS // len(series))
    for place, (one, start) in enumerate(zip(series, starts, strict=False)):
        kept = thinned(one.samples_ns, shared)
        drawn += len(kept)
        low, high = min(low, *one.samples_ns), max(high, *one.samples_ns)
        outliers = {each.index: each.cause for each in one.outliers}
        body: tuple[list[int], list[float]] = ([], [])
        for index in kept:
            where = body
            if index < one.warmup_dropped:
                where = causes.setdefault("warm-up, not used", ([], []))
            elif index in outliers:
                where = causes.setdefault(f"outlier: {outliers[index]}", ([], []))
            where[0].append(start + index)
            where[1].append(one.samples_ns[index] / unit_ns)
        data.append(_points(names[place], body, (BLUE, "#63a4dc")[place % 2], unit, 4))
    colours = dict(zip((c for c in causes if c[0] == "o"), _CAUSES * 99, strict=False))
    for cause, points in causes.items():
        data.append(_points(cause, points, colours.get(cause, GREY), unit, 7))
    logarithmic = high > _WIDE * low
    scale = {"type": "log", "dtick": "D2"} if logarithmic else {}
    layout: dict[str, Any] = {"yaxis": scale, "shapes": _borders(starts[1:-1])}
    axis = f"time per iteration, {unit}{' (logarithmic)' if logarithmic else ''}"
    shape = figure(data, "sample, in the order taken", axis, layout=layout)
    note = thinning_told(drawn, starts[-1])
    return Plot(title or "Samples over time", shape, note)


def _points(
    name: str, points: tuple[list[int], list[float]], colour: str, unit: str, size: int
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": points[0],
        "y": points[1],
        "marker": {"color": colour, "size": size, "opacity": 0.7 if size < 5 else 1},
        "hovertemplate": f"sample %{{x}}: %{{y:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
    }


def _borders(places: Sequence[int]) -> list[dict[str, Any]]:
    """Upright lines between series."""
    line = {"color": GREY, "width": 1, "dash": "dot"}
    ends = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": line}
    return [{**ends, "x0": at - 0.5, "x1": at - 0.5} for at in places]


def histogram(one: Measurement, median_ns: float, interval_ns: tuple[float, float] | None) -> Plot:
    """How often which time was taken after the warm-up, with the median, p90 and p99 marked."""
    samples = np.asarray(one.samples_ns[one.warmup_dropped :], dtype=np.float64)
    unit, unit_ns = unit_of(one.median_ns)
    marks = [("median", median_ns, BLUE, "solid"), ("p90", one.p90_ns, PURPLE, "dash")]
    if one.p99_ns is not None:
        marks.append(("p99", one.p99_ns, "#c53d3d", "dash"))
    # Bins as wide as the rare slow samples reach would show the others as one bar.
    top = max(float(np.quantile(samples, 0.99)), *(at for _, at, _, _ in marks))
    counts, edges = np.histogram(samples, bins=_BINS, range=(min(samples), max(top, min(samples))))
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    bars = {
        "type": "bar",
        "x": list(map(float, middles / unit_ns)),
        "y": list(map(int, counts)),
        "width": float(width / unit_ns),
        "marker": {"color": "#a9c6e3"},
        "showlegend": False,
        "hovertemplate": f"%{{x:.4g}} {unit}: %{{y}} samples<extra></extra>",
    }
    told = [(at / unit_ns, f"{name} {duration(at)}", c, dash) for name, at, c, dash in marks]
    layout: dict[str, Any] = {**lines_at(told), "bargap": 0}
    if interval_ns is not None:
        low, high = (bound / unit_ns for bound in interval_ns)
        band = {"x0": low, "x1": high, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 0}}
        layout["shapes"].insert(0, {"type": "rect", **band, "fillcolor": "rgba(43,108,176,0.2)"})
    beyond = int((samples > top).sum())
    note = "Shaded: the 95 % interval of the median. " if interval_ns is not None else ""
    if beyond:
        note += f"{beyond:,} of {len(samples):,} samples took more than {duration(top)}: see above."
    shape = figure([bars], f"time per iteration, {unit}", "samples", layout=layout)
    return Plot("How often", shape, note.strip())
