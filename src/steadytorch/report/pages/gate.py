"""The HTML page of a gate: a chart of the changes, and a table row per workload."""

from __future__ import annotations

from typing import Any

from steadytorch.report import gate
from steadytorch.report.plots import BLUE, GREY, RED, Plot, Table, figure, shortened, table
from steadytorch.results.gate import GateResult
from steadytorch.results.saved import Saved

_MOST_DRAWN = 60


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a gate."""
    document: GateResult = saved.result
    return {
        "title": saved.head.workload,
        "headline": f"gate {gate.headline(document)}",
        "details": gate.details(document),
        "effects": _effects(document),
        "rows": _rows(document),
    }


def _rows(document: GateResult) -> Table:
    rows = [(*gate.cells_of(row), f"{row.processes:,}", f"{row.pairs:,}") for row in document.rows]
    headings = ["workload", "base", "head", "change in time", "verdict", "processes", "pairs"]
    return table(headings, rows, (0, 3, 4), ids="workload")


def _effects(document: GateResult) -> Plot | None:
    """Charts the change of each workload with its interval, and the threshold."""
    drawn = [
        (f"{number}. {shortened(row.workload)}", row.interval, row.verdict)
        for number, row in enumerate(document.rows, 1)
        if row.interval is not None and row.interval.estimate is not None
    ][:_MOST_DRAWN]
    if not drawn:
        return None
    names = [name for name, _, _ in drawn]
    estimates = [100 * (effect.estimate or 0.0) for _, effect, _ in drawn]
    ends = [(effect.low, effect.high) for _, effect, _ in drawn]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": estimates,
            "y": names,
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [
                    0 if high is None else 100 * high - at
                    for (_, high), at in zip(ends, estimates, strict=True)
                ],
                "arrayminus": [
                    0 if low is None else at - 100 * low
                    for (low, _), at in zip(ends, estimates, strict=True)
                ],
                "color": BLUE,
            },
            "marker": {
                "color": [RED if verdict == "slower" else BLUE for _, _, verdict in drawn],
                "size": 9,
            },
            "showlegend": False,
            "hovertemplate": "%{y}: %{x:+.2f} %<extra></extra>",
        }
    ]
    line = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
    limit = 100 * document.threshold
    shapes = [
        {**line, "x0": at, "x1": at, "line": {"color": colour, "width": 1, "dash": dash}}
        for at, colour, dash in ((0, GREY, "solid"), (limit, RED, "dash"))
    ]
    shape = figure(
        data,
        "change in time of the head, %",
        "",
        height=120 + 34 * len(drawn),
        layout={"shapes": shapes, "yaxis": {"autorange": "reversed"}},
    )
    note = "Bars: intervals. Dashed: the threshold. Numbers are rows of the table."
    return Plot("Change of each workload", shape, note, rows="workload")
