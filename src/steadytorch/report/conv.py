"""Renders a network's convolutions in the terminal: a table of all, or the engines of one."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from steadytorch.quantities import size
from steadytorch.report.text import plain, seconds, share
from steadytorch.results.conv import ConvReport, Layer, LeftOut, Measured

_US = 1e-3
_CONVOLUTIONS = "distinct convolutions"
_PASSES = " pass: forward (fprop), gradient by the input (dgrad) or by the weight (wgrad)."
_BITS = {True: "=", False: "~", None: "?"}
"""Marks of engines: deterministic, not deterministic, unknown."""
ENGINE_HEADINGS = ("us", "spread", "runs", "workspace", "error", "notes")


def render_conv(console: Console, workload: str, report: ConvReport) -> None:
    """Prints the table of distinct convolutions, in the order of the network.

    For a training step, the table has a row for each pass. Convolutions without a row are listed
    below the table.
    """
    console.print(f"{plain(workload)}: {headline(report)}")
    if report.layers:
        _render_rows(console, report)
    for left in report.left_out:
        console.print(format_left_out(left))
    if report.layers:
        _render_legend(console, report)


def headline(report: ConvReport) -> str:
    """The number and kind of table rows: distinct convolutions, or passes of a training step."""
    rows = (
        "passes of distinct convolutions in a training step" if _trains(report) else _CONVOLUTIONS
    )
    return f"{len(report.layers)} {rows}"


def format_left_out(left: LeftOut) -> str:
    """One line with the convolutions that are left to PyTorch, and the reason."""
    return f"Left to PyTorch: {_names(left)} ({len(left.names)}): {plain(left.reason)}"


def _render_rows(console: Console, report: ConvReport) -> None:
    table = _table(between=0)
    for heading in headings(report):
        table.add_column(heading, justify="left" if heading == "pass" else "right", no_wrap=True)
    for row in rows(report):
        table.add_row(*row)
    console.print(table)
    for number, layer in enumerate(report.layers, 1):
        # A row of its own: neither fits beside the figures in 80 columns.
        console.print(f"{number:>3} {plain(layer.problem)}", soft_wrap=True)
        console.print(f"    {plain(engine_of(layer))}", style="dim", soft_wrap=True)


def headings(report: ConvReport) -> list[str]:
    """The column headings of the table of convolutions."""
    named = ["#", "pass"] if _trains(report) else ["#"]
    figures = [
        "n",
        "share",
        "us",
        "default",
        "bench",
        "gain",
        "TFLOP/s",
        "limit",
        "memory",
        "error",
    ]
    return [*named, *figures, ""]


def rows(report: ConvReport) -> list[tuple[str, ...]]:
    """A table row per convolution, or per pass of a convolution, in the order of the network."""
    total_ns = sum(_total_ns(layer) for layer in report.layers)
    made = []
    for number, layer in enumerate(report.layers, 1):
        named = (str(number), layer.operation) if _trains(report) else (str(number),)
        made.append((*named, *_row(layer, report, total_ns)))
    return made


def engine_of(layer: Layer) -> str:
    """The chosen engine of a layer as text, or `not measured`."""
    return "not measured" if layer.outcome is None else layer.outcome.choice


def _render_legend(console: Console, report: ConvReport) -> None:
    """Prints the total times and the legend of the table."""
    for line in sums(report):
        console.print(line)
    console.print(legend(report), style="dim")


def legend(report: ConvReport) -> str:
    """The legend of the table of convolutions."""
    cache = "flushed before each run, as the network overflows it" if report.cold else "warm"
    return (
        "n: occurrences. us: time of one, with the fused epilogue. default, bench: the same in "
        "PyTorch, without and with benchmark mode, the epilogue in separate kernels. limit: least "
        "time at the measured rates over the time. memory: workspace. Last column: = same bits on "
        "every run, by cuDNN's notes and two runs; ~ not the same; ? unknown. L2 cache "
        f"{cache}.{_PASSES if _trains(report) else ''}"
    )


def _trains(report: ConvReport) -> bool:
    return len(report.passes) > 1


def sums(report: ConvReport) -> list[str]:
    """The total time of all measured convolutions; for a training step, also by pass."""
    if not (any(map(_total_ns, report.layers)) and any(map(_default_ns, report.layers))):
        return []

    def total(of: Callable[[Layer], float | None]) -> str:
        each = dict.fromkeys(report.passes, 0.0)
        for layer in report.layers:
            each[layer.operation] += len(layer.names) * (of(layer) or 0.0) * _US
        parts = ", ".join(f"{name} {spent:.0f}" for name, spent in each.items())
        return f"{sum(each.values()):.0f} us{f' ({parts})' if len(each) > 1 else ''}"

    return [
        f"Total: {total(_chosen_ns)} with the chosen engines, {total(_default_ns)} with PyTorch's "
        f"default. Choosing took {seconds(report.seconds)}."
    ]


def render_layer(console: Console, layer: Layer) -> None:
    """Prints all engines of one convolution: fastest first, then the excluded ones with reasons."""
    console.print(plain(layer.problem), f"({len(layer.names)} times: {_names(layer)})")
    if layer.outcome is None:
        console.print(f"Not measured: {plain(layer.reason or 'the time ran out before')}.")
        return
    if layer.reason is not None:
        console.print(f"Not timed: {plain(layer.reason)}.")
    table = _table()
    table.add_column("engine", ratio=2, overflow="fold")
    for heading in ENGINE_HEADINGS[:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(ENGINE_HEADINGS[-1], ratio=2, overflow="fold")
    for engine in layer.outcome.engines:
        mark = " *" if engine.choice == layer.outcome.choice else ""
        table.add_row(plain(engine.choice) + mark, *engine_row(engine))
    console.print(table)
    console.print("* chosen. spread: half the interquartile range.", style="dim")


def _row(layer: Layer, report: ConvReport, total_ns: float) -> tuple[str, ...]:
    outcome, times = layer.outcome, str(len(layer.names))
    if outcome is None or not outcome.chosen_ns:
        return (times, *[""] * 10)
    chosen_ns = outcome.chosen_ns
    found = outcome.chosen
    least_s = max(
        layer.operations / report.operations_per_s, layer.traffic_bytes / report.bytes_per_s
    )
    return (
        *(times, share(_total_ns(layer), total_ns)),
        *(f"{chosen_ns * _US:.1f}", _microseconds(outcome.default_ns)),
        _microseconds(outcome.benchmark_ns),
        "" if outcome.default_ns is None else f"{outcome.default_ns / chosen_ns:.2f}x",
        f"{layer.operations / chosen_ns * 1e-3:.0f}",
        f"{100 * least_s * 1e9 / chosen_ns:.0f} %",
        _bytes(found.workspace_bytes),
        "" if found.error is None else f"{found.error:.0e}",
        _BITS[layer.deterministic],
    )


def engine_row(engine: Measured) -> tuple[str, ...]:
    """An engine's figures, in the order of `ENGINE_HEADINGS`."""
    said = [engine.excluded] if engine.excluded else []
    return (
        _microseconds(engine.median_ns),
        "" if engine.spread is None else f"{100 * engine.spread:.1f} %",
        str(engine.runs or ""),
        _bytes(engine.workspace_bytes),
        "" if engine.error is None else f"{engine.error:.0e}",
        plain("; ".join([*said, *(note.lower().replace("_", " ") for note in engine.notes)])),
    )


def _total_ns(layer: Layer) -> float:
    return len(layer.names) * (_chosen_ns(layer) or 0.0)


def _chosen_ns(layer: Layer) -> float | None:
    return None if layer.outcome is None else layer.outcome.chosen_ns


def _default_ns(layer: Layer) -> float | None:
    return None if layer.outcome is None else layer.outcome.default_ns


def _names(layer: Layer | LeftOut) -> str:
    shown = ", ".join(map(plain, layer.names[:3]))
    return f"{shown}, ..." if len(layer.names) > 3 else shown


def _microseconds(nanoseconds: float | None) -> str:
    return "" if nanoseconds is None else f"{nanoseconds * _US:.1f}"


def _bytes(count: int | None) -> str:
    return "" if count is None else size(count)


def _table(between: int = 1) -> Table:
    """An empty table with `between` extra spaces between columns."""
    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, between, 0, 0))
