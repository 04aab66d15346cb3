"""The HTML page of a comparison: the verdict, the timed pairs, and the gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadytorch.report import compare
from steadytorch.report.plots import (
    BLUE,
    COLOURS,
    GREY,
    MOST_POINTS,
    Plot,
    Table,
    figure,
    format_thinning,
    table,
    thinned,
)
from steadytorch.report.text import duration, unit_of
from steadytorch.results.compare import CompareResult, SustainedRun
from steadytorch.results.saved import Saved

_MOST_NAMED = 8
Pairs = Sequence[Sequence[tuple[float, float]]]
"""Per process, its pairs: a block of A and one of B, in ns."""


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a comparison."""
    document: CompareResult = saved.result
    drawn = any(document.samples)
    return {
        "title": saved.head.workload,
        "headline": compare.sentence(document),
        "basis": compare.basis(document),
        "alone": compare.alone(document) if document.dwells else "",
        "gate": document.gate_failed,
        "differences": _differences(document) if drawn else None,
        "times": _times(document) if drawn else None,
        "figures": _figures(document),
        "pairs": _pairs(document.samples),
        "dwells": _sustained_runs(document.dwells),
    }


def _figures(document: CompareResult) -> Table:
    effect = document.interval
    interval = "none: too little data"
    if effect.low is not None and effect.high is not None:
        interval = f"{_percent(effect.low)} to {_percent(effect.high)}"
    rows = [
        (f"A {document.a.name}, {document.metric}", duration(document.a.median_ns)),
        (f"B {document.b.name}, {document.metric}", duration(document.b.median_ns)),
        ("effect of B on time", _percent(effect.estimate)),
        ("99 % interval", interval),
        ("verdict on B", document.verdict),
        ("claim", document.claim),
        ("pairs of blocks", f"{document.pairs:,}"),
        ("processes a side", f"{document.processes:,}"),
        (
            "smallest detectable effect (MDE)",
            "unknown" if document.mde is None else f"{100 * document.mde:.2f} %",
        ),
        ("gate", "failed" if document.gate_failed else "passed, or not set"),
    ]
    return table(["figure", "value"], rows, (0, 1))


def _percent(fraction: float | None) -> str:
    return "none" if fraction is None else f"{100 * fraction:+.2f} %"


def _differences(document: CompareResult) -> Plot:
    """Charts the difference in each timed pair, with the interval of the effect."""
    several = 1 < len(document.samples) <= _MOST_NAMED
    apart, names = [], []
    for number, pairs in enumerate(document.samples, 1):
        apart += [100 * (b / a - 1) for a, b in pairs]
        names += [f"process {number}" if several else "pairs"] * len(pairs)
    kept = thinned(apart)
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [place + 1 for place in kept if names[place] == name],
            "y": [apart[place] for place in kept if names[place] == name],
            "marker": {"color": COLOURS[number], "size": 7, "opacity": 0.85},
            "showlegend": several,
            "hovertemplate": "pair %{x}: %{y:+.2f} %<extra></extra>",
        }
        for number, name in enumerate(dict.fromkeys(names))
    ]
    line = {"type": "line", "x0": 0, "x1": 1, "xref": "paper"}
    shapes: list[dict[str, Any]] = [{**line, "y0": 0, "y1": 0, "line": {"color": GREY, "width": 2}}]
    effect = document.interval
    if effect.low is not None and effect.high is not None:
        ends = {"y0": 100 * effect.low, "y1": 100 * effect.high, "line": {"width": 0}}
        shapes.append({**line, "type": "rect", **ends, "fillcolor": "rgba(43,108,176,0.18)"})
    if effect.estimate is not None:
        at = 100 * effect.estimate
        shapes.append(
            {**line, "y0": at, "y1": at, "line": {"color": BLUE, "width": 2, "dash": "dash"}}
        )
    note = "Dashed: the effect. Below zero B takes less time. " + (
        "Shaded: its 99 % interval. " if effect.low is not None else ""
    )
    shape = figure(data, "pair, in the order taken", "B against A, %", layout={"shapes": shapes})
    told = format_thinning(len(kept), len(apart), "pairs")
    return Plot("Each pair's difference", shape, f"{note}{told}".strip(), rows="pair")


def _times(document: CompareResult) -> Plot:
    """Charts the timed blocks of both sides over time."""
    flat = [pair for process in document.samples for pair in process]
    unit, unit_ns = unit_of(flat[0][0])
    data, drawn = [], 0
    for side, (letter, colour) in enumerate((("A", BLUE), ("B", COLOURS[1]))):
        times = [pair[side] for pair in flat]
        kept = thinned(times, MOST_POINTS // 2)
        drawn += len(kept)
        name = f"{letter} {(document.a, document.b)[side].name}"
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [i + 1 for i in kept],
                "y": [times[i] / unit_ns for i in kept],
                "marker": {"color": colour, "size": 6, "opacity": 0.85},
                "hovertemplate": f"pair %{{x}}: %{{y:.4g}} {unit}<extra></extra>",
            }
        )
    shape = figure(data, "pair, in the order taken", f"time per iteration, {unit}")
    return Plot("Both sides", shape, format_thinning(drawn, 2 * len(flat), "blocks"), rows="pair")


def _pairs(samples: Pairs) -> Table:
    rows = [
        (process, number, duration(a), duration(b), f"{100 * (b / a - 1):+.2f} %")
        for process, pairs in enumerate(samples, 1)
        for number, (a, b) in enumerate(pairs, 1)
    ]
    return table(["process", "pair", "A", "B", "B against A"], rows, (), ids="pair")


def _sustained_runs(dwells: Sequence[SustainedRun]) -> Table:
    rows = [
        (
            *(each.side.upper(), f"{each.seconds:.1f} s", duration(each.median_ns)),
            None if each.sm_clock_mhz is None else f"{each.sm_clock_mhz:.0f} MHz",
        )
        for each in dwells
    ]
    return table(["side alone", "for", "median", "SM clock"], rows)
