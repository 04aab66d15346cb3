"""Renders the result of `steady gate` in the terminal and as a Markdown comment."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from steadytorch.quantities import counted
from steadytorch.report.text import (
    duration,
    keep_words_whole,
    markdown_text,
    plain,
    print_indented,
)
from steadytorch.results.gate import GateResult, GateRow

_STYLES = {"faster": "bold green", "slower": "bold red"}
_WORDS = {"undecided": "cannot tell"}


def headline(result: GateResult) -> str:
    """The outcome of the gate in one sentence."""
    limit = f"{100 * result.threshold:g} %"
    slower, judged = result.count("slower"), sum(row.status == "judged" for row in result.rows)
    if result.interrupted:
        return f"interrupted: {judged} of {counted(len(result.rows), 'workload')} judged"
    if slower:
        return f"failed: {slower} of {counted(judged, 'workload')} slower by more than {limit}"
    if result.failed:
        failed = counted(len(result.failed), "workload")
        return f"not answered: {failed} of {len(result.rows)} cannot be timed on both sides"
    if not judged:
        return "passed: no workload exists on both sides"
    return f"passed: no workload shown to be slower by more than {limit}"


def change(row: GateRow) -> str:
    """A workload's change in time and its interval, as text; a dash without an estimate."""
    effect = row.interval
    if effect is None or effect.estimate is None:
        return "-"
    if effect.low is None or effect.high is None:
        return f"{100 * effect.estimate:+.2f} %"
    return f"{100 * effect.estimate:+.2f} % ({100 * effect.low:+.2f} to {100 * effect.high:+.2f})"


def verdict(row: GateRow) -> str:
    """The verdict on a workload, or its status if there is no verdict."""
    if row.verdict == "undecided" and row.mde is not None:
        return f"{_short_verdict(row)}; detectable {100 * row.mde:.1f} %"
    return _short_verdict(row)


def _short_verdict(row: GateRow) -> str:
    return row.status if row.verdict is None else _WORDS.get(row.verdict, row.verdict)


def _detectable(result: GateResult) -> list[str]:
    """A line with the smallest detectable change of each undecided workload."""
    found = [
        f"{row.workload} {100 * row.mde:.1f} %"
        for row in result.rows
        if row.verdict == "undecided" and row.mde is not None
    ]
    return [f"Detectable changes: {', '.join(found)}."] if found else []


def details(result: GateResult) -> list[str]:
    """Sentences on the compared commits, the error control and remarks."""
    base, head = result.base, result.head
    judged = [row.processes for row in result.rows if row.status == "judged"]
    lines = [
        f"Base {base.name} ({base.commit[:12]}), head {head.name} on {head.commit[:12]}; "
        f"{result.metric} per call, change in time of the head.",
        f"Intervals hold for all workloads together with "
        f"{100 * (1 - result.familywise_alpha):g} % confidence.",
    ]
    if judged:
        most, least = max(judged), min(judged)
        span = str(most) if most == least else f"{least} to {most}"
        lines[1] += f" Evidence: {span} fresh processes a side."
    lines += [f"{row.workload}: {row.reason}" for row in result.rows if row.reason is not None]
    return [*lines, *result.notes]


def render_gate(console: Console, result: GateResult) -> None:
    """Prints the outcome of a gate, a row per workload and the evidence."""
    style = "bold red" if result.gate_failed else "bold"
    console.print(Text(f"gate {headline(result)}", style))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("workload", overflow="fold")
    for name in ("base", "head"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("change", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for row in result.rows:
        cells = [Text(plain(cell)) for cell in (*cells_of(row)[:-1], _short_verdict(row))]
        cells[-1].stylize(_STYLES.get(row.verdict or "", ""))
        table.add_row(*cells)
    keep_words_whole(table, console.width, [0])
    console.print(table)
    for line in [*_detectable(result), *details(result)]:
        print_indented(console, Text(plain(line)))


def cells_of(row: GateRow) -> tuple[str, ...]:
    """Table cells of one workload: name, base, head, change, verdict."""
    times = ["-" if ns is None else duration(ns) for ns in (row.base_median_ns, row.head_median_ns)]
    return row.workload, *times, change(row), verdict(row)


def markdown(result: GateResult) -> str:
    """The result of a gate as one Markdown comment for a pull request."""
    lines = [
        f"### steady gate {headline(result)}",
        "",
        "| workload | base | head | change in time | verdict |",
        "|---|--:|--:|---|---|",
    ]
    for row in result.rows:
        *cells, last = map(markdown_text, cells_of(row))
        shown = f"**{last}**" if row.verdict in _STYLES else last
        lines.append(f"| {' | '.join([*cells, shown])} |")
    lines += ["", *(f"- {markdown_text(line)}" for line in details(result))]
    return "\n".join(lines) + "\n"
