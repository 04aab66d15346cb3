"""Charts of sample series, shared by several pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from steadytorch.report.plots import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    LEGEND,
    OLIVE,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TEAL,
    Plot,
    figure,
    format_thinning,
    lines_at,
    thinned,
)
from steadytorch.report.text import duration, unit_of
from steadytorch.results.measure import Measurement

_BINS = 60
_MOST_BORDERS = 50
_WARM_UP = "warm-up, not used"
_WIDE = 4.0
"""From this ratio of the slowest sample to the fastest a linear axis would flatten the rest."""
_CAUSES = (ORANGE, RED, PURPLE, GREEN, PINK, BROWN, TEAL, OLIVE)


def timeline(
    series: Sequence[Measurement],
    names: Sequence[str],
    colours: Mapping[str, str],
    title: str = "Samples over time",
    rows: str = "",
) -> Plot:
    """Charts all series in sequence, with the warm-up marked and outliers coloured by cause.

    Args:
        series: at least one.
        names: name of each series in the legend; series may share one.
        colours: name to colour.
        title: title of the chart.
        rows: prefix of the ids to which its points lead; see `Plot`.
    """
    unit, unit_ns = unit_of(series[0].median_ns)
    starts = list(accumulate((len(each.samples_ns) for each in series), initial=0))
    samples = [sample for each in series for sample in each.samples_ns]
    kept = thinned(samples)
    groups: dict[str, list[int]] = {name: [] for name in names}
    labels = _outlier_labels(series, starts)
    which = 0
    for place in kept:
        while place >= starts[which + 1]:
            which += 1
        dropped = place < starts[which] + series[which].warmup_dropped
        name = _WARM_UP if dropped else labels.get(place, names[which])
        groups.setdefault(name, []).append(place)
    causes = dict(zip(dict.fromkeys(labels.values()), _CAUSES, strict=False))
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": places,
            "y": [samples[place] / unit_ns for place in places],
            "marker": {
                "color": {_WARM_UP: GREY, **causes, **colours}[name],
                "size": 7 if name in causes else 4,
                "opacity": 1 if name in causes else 0.7,
            },
            "hovertemplate": f"sample %{{x}}: %{{y:.4g}} {unit}<extra>%{{fullData.name}}</extra>",
        }
        for name, places in groups.items()
    ]
    logarithmic = max(samples) > _WIDE * min(samples)
    layout: dict[str, Any] = {
        "yaxis": {"type": "log", "dtick": "D2", "tickformat": "~g"} if logarithmic else {},
        "shapes": _borders(starts[1:-1]) if len(series) <= _MOST_BORDERS else [],
        # Plotly draws markers in the legend as small as in the picture.
        "legend": {**LEGEND, "itemsizing": "constant"},
    }
    axis = f"time per iteration, {unit}{' (logarithmic)' if logarithmic else ''}"
    shape = figure(data, "sample, in the order taken", axis, layout=layout)
    return Plot(title, shape, format_thinning(len(kept), len(samples)), rows)


def _outlier_labels(series: Sequence[Measurement], starts: Sequence[int]) -> dict[int, str]:
    """Maps the index of each outlier among all samples to a label; rare causes share one label."""
    outliers = [
        (start + outlier.index, outlier.cause)
        for one, start in zip(series, starts, strict=False)
        for outlier in one.outliers
    ]
    ranked = [cause for cause, _ in Counter(cause for _, cause in outliers).most_common()]
    own = ranked if len(ranked) <= len(_CAUSES) else ranked[: len(_CAUSES) - 1]
    named = {cause: f"outlier: {cause}" for cause in own}
    return {place: named.get(cause, "outliers of other causes") for place, cause in outliers}


def _borders(places: Sequence[int]) -> list[dict[str, Any]]:
    """Vertical lines between adjacent series."""
    line = {"color": GREY, "width": 1, "dash": "dot"}
    ends = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": line}
    return [{**ends, "x0": at - 0.5, "x1": at - 0.5} for at in places]


def histogram(
    one: Measurement, median_ns: float, interval_ns: tuple[float, float] | None, title: str
) -> Plot:
    """Charts the distribution of the samples after the warm-up, with median, p90 and p99 marked."""
    samples = np.asarray(one.samples_ns[one.warmup_dropped :], dtype=np.float64)
    unit, unit_ns = unit_of(one.median_ns)
    marks = [("median", median_ns, BLUE, "solid"), ("p90", one.p90_ns, PURPLE, "dash")]
    if one.p99_ns is not None:
        marks.append(("p99", one.p99_ns, RED, "dash"))
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
    labels = [(at / unit_ns, f"{name} {duration(at)}", c, dash) for name, at, c, dash in marks]
    layout: dict[str, Any] = {**lines_at(labels), "bargap": 0}
    if interval_ns is not None:
        low, high = (bound / unit_ns for bound in interval_ns)
        band = {"x0": low, "x1": high, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 0}}
        layout["shapes"].insert(0, {"type": "rect", **band, "fillcolor": "rgba(43,108,176,0.2)"})
    beyond = int((samples > top).sum())
    note = "Shaded: the 95 % interval of the median. " if interval_ns is not None else ""
    if beyond:
        note += f"{beyond:,} of {len(samples):,} samples took more than {duration(top)}: see above."
    shape = figure([bars], f"time per iteration, {unit}", "samples", layout=layout)
    return Plot(title, shape, note.strip())
