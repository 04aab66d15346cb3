"""Figures and tables of pages as data; Plotly draws the figures in the browser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from steadytorch.report.text import plain

MOST_POINTS = 20_000
"""Most points in one chart: more make browsers slow."""
MOST_ROWS = 2_000
"""Most rows of one table: pages with more take seconds to open."""
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, GREY, TEAL, OLIVE = (
    *("#2b6cb0", "#dd7a1f", "#2f8f5b", "#c53d3d", "#7a5bb5"),
    *("#8a5a44", "#c85a9a", "#8b949e", "#1f9aa8", "#a8a12b"),
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, BROWN, PINK, GREY, TEAL, OLIVE)
LEGEND = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1.02,
    "yanchor": "bottom",
    "traceorder": "normal",
}
"""Above the chart, where it takes no width."""
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_LONGEST = 1000
"""Most characters of a string in a chart."""
_MARKUP = ("hovertemplate",)
"""Keys whose strings are this project's own markup; all other strings are escaped."""
# Browsers end a script, or start a comment, at these characters anywhere in it.
_UNSAFE = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Plot(NamedTuple):
    """One chart.

    Attributes:
        title: its caption.
        figure: Plotly's `data` and `layout`.
        note: a line below it, such as what is not drawn.
        rows: prefix of the ids of table rows or steps, to which a click on a point leads: that
            of a point is `rows-N`, where N is its x, or the number that begins its name on y.
    """

    title: str
    figure: dict[str, Any]
    note: str = ""
    rows: str = ""


class Link(NamedTuple):
    """A table cell that links to another place on the page.

    Attributes:
        text: the cell's text.
        to: id of the place.
    """

    text: str
    to: str


class Table(NamedTuple):
    """One table.

    Attributes:
        headings: one per column.
        rows: cells, one per column.
        words: indices of text columns, aligned left.
        note: a line below it.
        ids: prefix of the ids of rows, `ids-1` for the first; empty for no ids.
        total: the last row, which stays last in any order; None without one.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: tuple[int, ...] = (0,)
    note: str = ""
    ids: str = ""
    total: Sequence[object] | None = None

    @property
    def sorts(self) -> bool:
        """Whether readers may sort the table: it has at least three rows and a numeric column."""
        return len(self.rows) > 2 and len(self.words) < len(self.headings)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    words: tuple[int, ...] = (0,),
    note: str = "",
    *,
    ids: str = "",
    total: Sequence[object] | None = None,
) -> Table:
    """A table of at most `MOST_ROWS` rows; a note says how many rows are left out."""
    if len(rows) > MOST_ROWS:
        cut = f"Shown: the first {MOST_ROWS:,} of {len(rows):,} rows; the file has all of them."
        note = f"{note} {cut}".strip()
    return Table(headings, rows[:MOST_ROWS], words, note, ids, total)


def figure(
    data: list[dict[str, Any]],
    x: str,
    y: str,
    *,
    height: int = 340,
    layout: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A Plotly figure; the page's script adds the colours of text, axes and background.

    Args:
        data: the traces.
        x: title of the horizontal axis, with its unit.
        y: of the vertical one.
        height: in pixels; the width is that of the page.
        layout: overrides of the style; axes are merged.
    """
    special = dict(layout or {})
    axis = {"automargin": True}
    return {
        "data": data,
        "layout": {
            "height": height,
            "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
            "font": {"family": _FONT, "size": 12},
            "colorway": list(COLOURS),
            "legend": LEGEND,
            "hoverlabel": {"align": "left"},
            "xaxis": {**axis, "title": {"text": x, "standoff": 8}, **special.pop("xaxis", {})},
            "yaxis": {**axis, "title": {"text": y, "standoff": 8}, **special.pop("yaxis", {})},
            **special,
        },
    }


def embedded(value: Any, key: str = "") -> str:
    """A figure as JSON that is safe in a script element; floats have nine digits.

    Plotly renders some HTML in strings, so strings from results are escaped, and control characters
    are shown as escape sequences.
    """
    text = msgspec.json.encode(_escaped(value, key)).decode()
    return "".join(_UNSAFE.get(char, char) for char in text)


def _escaped(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return value if key in _MARKUP else escape(shortened(value, _LONGEST), quote=False)
    if isinstance(value, dict):
        return {name: _escaped(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        # Most of a page is numbers.
        return [each if type(each) is int else _escaped(each, key) for each in value]
    # Nine digits are finer than a pixel, and half as long as all.
    return float(f"{value:.9g}") if isinstance(value, float) else value


def shortened(name: str, most: int = 26) -> str:
    """A name truncated to at most `most` characters, to fit an axis."""
    shown = plain(name[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of the values to draw: all, or the minimum and maximum of each interval of values.

    Args:
        values: in drawing order.
        most: most indices to return; at least 2.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    array = np.asarray(values, dtype=np.float64)
    edges = np.linspace(0, count, most // 2 + 1).astype(int)
    kept: set[int] = set()
    for start, end in pairwise(edges):
        kept |= {int(start + array[start:end].argmin()), int(start + array[start:end].argmax())}
    return sorted(kept)


def format_thinning(drawn: int, count: int, what: str = "samples") -> str:
    """A note on the values that a chart omits; empty if it draws all."""
    if drawn == count:
        return ""
    return (
        f"{drawn:,} of {count:,} {what} are drawn: the minimum and maximum of each stretch. "
        "The file has all of them."
    )


def lines_at(places: Iterable[tuple[float, str, str, str]]) -> dict[str, Any]:
    """Vertical lines with labels at the top; `places` has items (x, label, colour, dash)."""
    shapes, annotations = [], []
    for row, (at, label, colour, dash) in enumerate(places):
        ends = {"x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper"}
        shapes.append({"type": "line", **ends, "line": {"color": colour, "width": 2, "dash": dash}})
        annotations.append(
            {
                "x": at,
                "y": 1 - 0.09 * row,
                "yref": "paper",
                "text": label,
                "showarrow": False,
                "xanchor": "left",
                "yanchor": "top",
                "xshift": 3,
                "font": {"color": colour},
            }
        )
    return {"shapes": shapes, "annotations": annotations}
