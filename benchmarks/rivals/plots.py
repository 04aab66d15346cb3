"""Small plots as inline SVG for pages of the site. Colours come from `site.css`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

LETTER = 5.6
"""Approximate width of a letter at the plots' font size, in pixels."""
TICK = 25
"""Least distance of ticks, in pixels."""


@dataclass(frozen=True)
class Points:
    """Markers at (x, y).

    Attributes:
        style: CSS class: `ours`, `hand` or `eager`.
        at: positions.
        titles: texts shown on hover, one per point, or empty.
        labels: texts to the right of the markers, one per point, or empty.
    """

    style: str
    at: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """A polyline through (x, y); `steps` draws the value of a point up to the next one."""

    style: str
    at: Sequence[tuple[float, float]]
    steps: bool = False


@dataclass(frozen=True)
class Axis:
    """Range and labels of an axis.

    Attributes:
        low: value at the left or bottom.
        high: value at the right or top.
        log: whether it is logarithmic; then `low` is above zero.
        label: its quantity with the unit.
        names: labels at 0, 1, ... of an axis of categories; none for a number.
    """

    low: float
    high: float
    log: bool = False
    label: str = ""
    names: Sequence[str] = ()

    def place(self, value: float, start: float, end: float) -> float:
        """Position of a value between the pixels `start` and `end`."""
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        return start + (scale(value) - low) / (high - low) * (end - start)

    def ticks(self, room: float) -> list[tuple[float, str]]:
        """Values and labels of ticks, at least about `TICK` of the `room` pixels apart."""
        if self.names:
            return [(float(k), name) for k, name in enumerate(self.names)]
        most = max(2, int(room / TICK))
        find = _decades if self.log else _round
        return [(value, f"{value:.10g}") for value in find(self.low, self.high, most)]


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: text above it, also its label for screen readers.
        x: horizontal axis.
        y: vertical axis; one of categories runs downwards.
        marks: points and lines, drawn in order.
        width: width in pixels.
        height: height in pixels.
    """

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Points | Line] = field(default_factory=tuple)
    width: int = 340
    height: int = 220


def _decades(low: float, high: float, most: int) -> list[float]:
    """Multiples of powers of ten, the finest that fit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= most:
            break
    return found


def _round(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, as many as fit."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(d * power for d in (1, 2, 5, 10, 20) if (high - low) / (d * power) < most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def svg(panel: Panel) -> str:
    """Draw one panel."""
    names = [text for _, text in panel.y.ticks(panel.height)]
    left = 8 + LETTER * max(map(len, names), default=0) + (14 if panel.y.label else 0)
    right, top, bottom = 10, 20, 34 if panel.x.label else 20
    box = (left, panel.width - right, panel.height - bottom, top)
    parts = [
        f'<svg role="img" viewBox="0 0 {panel.width} {panel.height}" width="{panel.width}" '
        f'height="{panel.height}" aria-label="{escape(panel.title)}">',
        f'<text class="title" x="{left:.1f}" y="12">{escape(panel.title)}</text>',
        *_axes(panel, box),
    ]
    for mark in panel.marks:
        parts += _line(mark, panel, box) if isinstance(mark, Line) else _points(mark, panel, box)
    return "".join([*parts, "</svg>"])


Box = tuple[float, float, float, float]
"""Left, right, bottom and top of the area of the data, in pixels."""


def _at(panel: Panel, box: Box, x: float, y: float) -> tuple[float, float]:
    left, right, bottom, top = box
    ends = (top, bottom) if panel.y.names else (bottom, top)
    return panel.x.place(x, left, right), panel.y.place(y, *ends)


def _axes(panel: Panel, box: Box) -> Iterable[str]:
    left, right, bottom, top = box
    yield f'<path class="frame" d="M{left:.1f} {top}V{bottom}H{right}"/>'
    for value, text in panel.x.ticks(right - left):
        x = panel.x.place(value, left, right)
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{escape(text)}</text>'
    for value, text in panel.y.ticks(bottom - top):
        _, y = _at(panel, box, panel.x.low, value)
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right}"/>'
        yield f'<text x="{left - 4:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
    if panel.x.label:
        middle = (left + right) / 2
        yield (
            f'<text x="{middle:.1f}" y="{bottom + 28}" text-anchor="middle">'
            f"{escape(panel.x.label)}</text>"
        )
    if panel.y.label:
        middle = (top + bottom) / 2
        yield (
            f'<text transform="translate(10 {middle:.1f}) rotate(-90)" text-anchor="middle">'
            f"{escape(panel.y.label)}</text>"
        )


def _line(line: Line, panel: Panel, box: Box) -> Iterable[str]:
    places = [_at(panel, box, x, y) for x, y in line.at]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for x, y in places[1:]:
        path += f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f} {y:.1f}"
    yield f'<path class="line {line.style}" d="{path}"/>'


def _points(points: Points, panel: Panel, box: Box) -> Iterable[str]:
    for k, (x, y) in enumerate(points.at):
        left, top = _at(panel, box, x, y)
        title = f"<title>{escape(points.titles[k])}</title>" if points.titles else ""
        yield (
            f'<circle class="{points.style}" cx="{left:.1f}" cy="{top:.1f}" r="3.5">'
            f"{title}</circle>"
        )
        if points.labels:
            yield f'<text x="{left + 5:.1f}" y="{top - 3:.1f}">{escape(points.labels[k])}</text>'


def row(panels: Iterable[Panel]) -> str:
    """Draw panels beside each other, in as many lines as the page's width needs."""
    return f'<div class="plots" data-search-exclude>{"".join(map(svg, panels))}</div>\n'
