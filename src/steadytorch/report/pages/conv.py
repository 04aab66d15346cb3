"""The page of a network's convolutions and their engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from steadytorch.report import conv
from steadytorch.report.pages.document import Document
from steadytorch.report.plots import BLUE, GREY, Plot, Table, figure, shortened, table

Pass = Literal["fprop", "dgrad", "wgrad"]
_PASSES: tuple[Pass, ...] = ("fprop", "dgrad", "wgrad")
_MOST_DRAWN = 80


class Engine(msgspec.Struct, frozen=True):
    """One engine in the field."""

    choice: str
    median_ns: float | None = None
    spread: float | None = None
    runs: int = 0
    workspace_bytes: int | None = None
    notes: tuple[str, ...] = ()
    error: float | None = None
    excluded: str | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What was found for one convolution."""

    choice: str
    default_ns: float | None
    benchmark_ns: float | None
    chosen_ns: float | None
    engines: tuple[Engine, ...]

    @property
    def chosen(self) -> Engine:
        """The chosen one in the field."""
        found = [each for each in self.engines if each.choice == self.choice]
        if not found:
            raise LookupError("a chosen engine is not among those that were looked at")
        return found[0]


class Convolution(msgspec.Struct, frozen=True, kw_only=True):
    """A distinct convolution, or one pass of it."""

    names: tuple[str, ...]
    problem: str
    outcome: Outcome | None
    operations: int
    traffic_bytes: int
    reason: str | None = None
    operation: Pass = msgspec.field(name="pass", default="fprop")
    deterministic: bool | None = None


class Omitted(msgspec.Struct, frozen=True):
    """Convolutions that no engine can run."""

    names: tuple[str, ...]
    reason: str


class ConvDocument(Document, frozen=True, kw_only=True):
    """What the page needs of a choice of engines."""

    layers: tuple[Convolution, ...]
    cold: bool
    operations_per_s: float
    bytes_per_s: float
    seconds: float
    left_out: tuple[Omitted, ...] = ()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Which there are, in the order of a training step."""
        found = {layer.operation for layer in self.layers}
        return tuple(each for each in _PASSES if each in found)


def contents(document: ConvDocument) -> dict[str, Any]:
    """What the template shows of a choice of engines."""
    layers = document.layers
    return {
        "title": document.workload,
        "headline": conv.headline(document),
        "sums": conv.sums(document),
        "picture_of": _picture(layers) if any(_timed(layer) for layer in layers) else None,
        "rows": table(conv.headings(document), conv.rows(document), (), conv.legend(document)),
        "chosen": table(
            ["#", "convolution", "engine", "where it stands", "times"],
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
        "left_out": [conv.left_out_told(left) for left in document.left_out],
    }


def _timed(layer: Convolution) -> bool:
    return layer.outcome is not None and layer.outcome.chosen_ns is not None


def _engines(outcome: Outcome) -> Table:
    rows = [
        (each.choice, "chosen" if each.choice == outcome.choice else "", *conv.engine_row(each))
        for each in outcome.engines
    ]
    return table(["engine", "", *conv.ENGINE_HEADINGS], rows, (0, 1, 7))


def _picture(layers: Sequence[Convolution]) -> Plot:
    """The chosen engine and PyTorch's default beside one another."""
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
    note = "One run of each, with what is fused into it; the numbers are those of the table."
    if len(shown) < len(timed):
        note += f" The first {len(shown)} of {len(timed)} are drawn."
    shape = figure(data, "time of one, us", "", height=130 + 30 * len(shown), layout=layout)
    return Plot("Chosen engines beside PyTorch's default", shape, note)
