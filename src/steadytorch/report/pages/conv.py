"""The HTML page of a network's convolutions and their engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadytorch.report import conv
from steadytorch.report.plots import BLUE, GREY, Link, Plot, Table, figure, shortened, table
from steadytorch.results.conv import ConvOutcome, ConvReport, Layer
from steadytorch.results.saved import Saved

_MOST_DRAWN = 80


def contents(saved: Saved) -> dict[str, Any]:
    """Template variables for the page of a network's convolutions."""
    document: ConvReport = saved.result
    layers = document.layers
    return {
        "title": saved.head.workload,
        "headline": conv.headline(document),
        "sums": conv.sums(document),
        "picture_of": _picture(layers) if any(_timed(layer) for layer in layers) else None,
        "rows": _rows(document),
        "chosen": table(
            ["#", "convolution", "engine", "layers", "times"],
            [
                (n, layer.problem, conv.engine_of(layer), ", ".join(layer.names), len(layer.names))
                for n, layer in enumerate(layers, 1)
            ],
            (1, 2, 3),
        ),
        "engines": [
            (number, layer, _engines(layer.outcome))
            for number, layer in enumerate(layers, 1)
            if layer.outcome is not None
        ],
        "left_out": [conv.format_left_out(left) for left in document.left_out],
    }


def _rows(document: ConvReport) -> Table:
    """A table row per convolution or pass; the row number links to the engines of the row."""
    rows = [
        (number if layer.outcome is None else Link(number, f"engines-{number}"), *cells)
        for layer, (number, *cells) in zip(document.layers, conv.rows(document), strict=True)
    ]
    return table(conv.headings(document), rows, (), conv.legend(document), ids="convolution")


def _timed(layer: Layer) -> bool:
    return layer.outcome is not None and layer.outcome.chosen_ns is not None


def _engines(outcome: ConvOutcome) -> Table:
    rows = [
        (each.choice, "chosen" if each.choice == outcome.choice else "", *conv.engine_row(each))
        for each in outcome.engines
    ]
    return table(["engine", "", *conv.ENGINE_HEADINGS], rows, (0, 1, 7))


def _picture(layers: Sequence[Layer]) -> Plot:
    """Charts the time of each chosen engine beside that of PyTorch's default."""
    timed = [(n, layer) for n, layer in enumerate(layers, 1) if _timed(layer)]
    shown = timed[:_MOST_DRAWN]
    names = [f"{n} {shortened(layer.names[0], 18)}" for n, layer in shown]
    data = []
    for name, field, colour in (
        ("PyTorch's default", "default_ns", GREY),
        ("chosen engine", "chosen_ns", BLUE),
    ):
        times = [getattr(layer.outcome, field) for _, layer in shown]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": names,
                "x": [None if time_ns is None else time_ns / 1e3 for time_ns in times],
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.4g} us<extra>%{fullData.name}</extra>",
            }
        )
    layout = {
        "barmode": "group",
        "bargap": 0.3,
        "yaxis": {"type": "category", "autorange": "reversed", "tickfont": {"size": 11}},
    }
    note = "One run of each, with the fused epilogue. Numbers are rows of the table."
    if len(shown) < len(timed):
        note += f" Drawn: the first {len(shown)} of {len(timed)}."
    shape = figure(data, "time of one, us", "", height=130 + 30 * len(shown), layout=layout)
    title = "Chosen engines beside PyTorch's default"
    return Plot(title, shape, note, rows="convolution")
