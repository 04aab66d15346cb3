"""Convolutions and their engines in the terminal: a row per convolution, or all engines of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from steadytorch.quantities import size
from steadytorch.report.text import plain, seconds, share

if TYPE_CHECKING:
    from steadytorch.conv.timing import Measured
    from steadytorch.report.pages.conv import ConvDocument, Convolution, Engine, Omitted
    from steadytorch.tune.conv import ConvReport, Layer, LeftOut

_US = 1e-3
_CONVOLUTIONS = "distinct convolutions"
_PASSES = " pass: forward (fprop), gradient by the input (dgrad) or by the weight (wgrad)."
_BITS = {True: "=", False: "~", None: "?"}
"""Marks of engines that are deterministic, that are not, and of which it is not known."""
ENGINE_HEADINGS = ("us", "spread", "runs", "workspace", "error", "notes")


def render_conv(console: Console, workload: str, report: ConvReport) -> None:
    """The table of distinct convolutions, in the order of the network.

    Of a training step it has a row for each pass of each. Below it stands what has no row.
    """
    console.print(f"{plain(workload)}: {headline(report)}")
    if report.layers:
        _render_rows(console, report)
    for left in report.left_out:
        console.print(left_out_told(left))
    if report.layers:
        _render_legend(console, report)


def headline(report: ConvReport | ConvDocument) -> str:
    """What the rows of the table are, and how many there are."""
    rows = (
        "passes of distinct convolutions in a training step" if _trains(report) else _CONVOLUTIONS
    )
    return f"{len(report.layers)} {rows}"


def left_out_told(left: LeftOut | Omitted) -> str:
    """Convolutions that have no row, and why."""
    return f"Left out, run by PyTorch: {_names(left)} ({len(left.names)}): {plain(left.reason)}"


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


def headings(report: ConvReport | ConvDocument) -> list[str]:
    """Of the columns of `rows`."""
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


def rows(report: ConvReport | ConvDocument) -> list[tuple[str, ...]]:
    """A row per convolution, or per pass of one, in the order of the network."""
    total_ns = sum(_total_ns(layer) for layer in report.layers)
    made = []
    for number, layer in enumerate(report.layers, 1):
        named = (str(number), layer.operation) if _trains(report) else (str(number),)
        made.append((*named, *_row(layer, report, total_ns)))
    return made


def engine_of(layer: Layer | Convolution) -> str:
    """What runs it."""
    return "not measured" if layer.outcome is None else layer.outcome.choice


def _render_legend(console: Console, report: ConvReport) -> None:
    """The sums, and what the columns mean."""
    for line in sums(report):
        console.print(line)
    console.print(legend(report), style="dim")


def legend(report: ConvReport | ConvDocument) -> str:
    """What the columns of `rows` mean."""
    cache = "flushed before each run, since the network overflows it" if report.cold else "warm"
    return (
        "n: how often; us: one, with what is fused into it; default and bench: the same by "
        "PyTorch, without and with its benchmark mode, the rest in kernels of its own. limit: the "
        "least time that the measured rates allow over the time; memory: workspace. Last: = the "
        "same bits from run to run, by cuDNN's notes and two runs; ~ not so; ? not known. L2 cache "
        f"{cache}.{_PASSES if _trains(report) else ''}"
    )


def _trains(report: ConvReport | ConvDocument) -> bool:
    return len(report.passes) > 1


def sums(report: ConvReport | ConvDocument) -> list[str]:
    """What all convolutions that were measured take, of a training step by passes as well."""
    if not (any(map(_total_ns, report.layers)) and any(map(_default_ns, report.layers))):
        return []

    def told(of: Callable[[Layer | Convolution], float | None]) -> str:
        each = dict.fromkeys(report.passes, 0.0)
        for layer in report.layers:
            each[layer.operation] += len(layer.names) * (of(layer) or 0.0) * _US
        parts = ", ".join(f"{name} {spent:.0f}" for name, spent in each.items())
        return f"{sum(each.values()):.0f} us{f' ({parts})' if len(each) > 1 else ''}"

    return [
        f"All together {told(_chosen_ns)} by the chosen engines, {told(_default_ns)} by PyTorch's "
        f"default. Chosen in {seconds(report.seconds)}."
    ]


def render_layer(console: Console, layer: Layer) -> None:
    """All engines of one convolution: the field, fastest first, then those excluded and why."""
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
    console.print("* chosen. spread: half the distance between the quartiles.", style="dim")


def _row(
    layer: Layer | Convolution, report: ConvReport | ConvDocument, total_ns: float
) -> tuple[str, ...]:
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


def engine_row(engine: Measured | Engine) -> tuple[str, ...]:
    """An engine's figures, under `ENGINE_HEADINGS`."""
    said = [engine.excluded] if engine.excluded else []
    return (
        _microseconds(engine.median_ns),
        "" if engine.spread is None else f"{100 * engine.spread:.1f} %",
        str(engine.runs or ""),
        _bytes(engine.workspace_bytes),
        "" if engine.error is None else f"{engine.error:.0e}",
        plain("; ".join([*said, *(note.lower().replace("_", " ") for note in engine.notes)])),
    )


def _total_ns(layer: Layer | Convolution) -> float:
    return len(layer.names) * (_chosen_ns(layer) or 0.0)


def _chosen_ns(layer: Layer | Convolution) -> float | None:
    return None if layer.outcome is None else layer.outcome.chosen_ns


def _default_ns(layer: Layer | Convolution) -> float | None:
    return None if layer.outcome is None else layer.outcome.default_ns


def _names(layer: Layer | LeftOut | Omitted) -> str:
    shown = ", ".join(map(plain, layer.names[:3]))
    return f"{shown}, ..." if len(layer.names) > 3 else shown


def _microseconds(nanoseconds: float | None) -> str:
    return "" if nanoseconds is None else f"{nanoseconds * _US:.1f}"


def _bytes(count: int | None) -> str:
    return "" if count is None else size(count)


def _table(between: int = 1) -> Table:
    """An empty table with so many spaces between columns, beside the one of its rules."""
    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, between, 0, 0))
