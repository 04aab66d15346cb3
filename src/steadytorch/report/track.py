"""Prints series of benchmark results, with the changes found in them, in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from steadytorch.quantities import counted
from steadytorch.report.text import duration, plain, print_indented
from steadytorch.results.track import TrackChange, TrackResult, TrackSeries


def headline(result: TrackResult) -> str:
    """A headline such as `3 changes in 2 series`."""
    count = sum(len(series.changes) for series in result.series)
    return f"{counted(count, 'change')} in {_counted_series(len(result.series))}"


def basis(result: TrackResult) -> str:
    """The error control as text: the largest share of unchanged series that show a change."""
    return f"at most {100 * result.alpha:g} % of series without a change show one"


def title(series: TrackSeries) -> str:
    """The title of a series: workload, metric, number of results and machine."""
    unit = f"time over {series.base}" if series.unit == "ratio" else series.metric
    points = counted(len(series.points), "result")
    return f"{series.workload}, {unit}, {points}, {series.machine}"


def format_value(series: TrackSeries, value: float) -> str:
    """A value of the series with its unit."""
    return f"{value:.4f}" if series.unit == "ratio" else duration(value)


def format_change(series: TrackSeries, change: TrackChange) -> str:
    """One change as text: size, interval, position and number of results that established it."""
    effect = change.effect
    size = "unknown" if effect.estimate is None else f"{100 * effect.estimate:+.2f} %"
    if effect.low is not None and effect.high is not None:
        size += f" (99 % interval {100 * effect.low:+.2f} to {100 * effect.high:+.2f})"
    names = [point.label for point in series.points]
    at = names[change.index]
    if change.earliest != change.latest:
        at += f" (possible: {names[change.earliest]} to {names[change.latest]})"
    delay = change.found - change.index + 1
    return f"{size} at {at}, established after {counted(delay, 'result')}"


def render_track(console: Console, result: TrackResult) -> None:
    """Prints each series with its changes."""
    console.print(Text(headline(result), "bold"))
    for series in result.series:
        print_indented(console, Text(plain(title(series))))
        for change in series.changes:
            slower = (change.effect.estimate or 0) > 0
            style = "bold red" if slower else "bold green"
            print_indented(console, Text(plain(format_change(series, change)), style), 4)
        if not series.changes:
            last = series.points[-1]
            told = f"no change; last {format_value(series, last.value)} at {last.label}"
            print_indented(console, Text(plain(told)), 4)
    print_indented(console, Text(basis(result)))
    for note in result.notes:
        print_indented(console, Text(plain(note), "yellow"))


def _counted_series(count: int) -> str:
    return f"{count} series"
