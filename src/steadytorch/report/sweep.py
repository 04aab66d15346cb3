"""Renders a sweep over several workloads in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from steadytorch.quantities import counted
from steadytorch.report.text import plain, seconds
from steadytorch.results.sweep import Sweep, SweepRow


def render_sweep(console: Console, sweep: Sweep) -> None:
    """Prints a table row per workload, then reasons for failures or missing bundles, and totals."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("workload", ratio=1, overflow="fold")
    table.add_column("plan", no_wrap=True)
    table.add_column("gain, 99 % interval", no_wrap=True)
    table.add_column("worker", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for row in sweep.rows:
        table.add_row(*map(Text, _cells(row)))
    console.print(table)
    for row in sweep.rows:
        if row.reason is not None:
            reason = Text(f"{plain(row.workload)}: {plain(row.reason)}", "yellow")
            console.print(reason, soft_wrap=True)
    console.print(Text(totals(sweep)))


def format_row(row: SweepRow) -> str:
    """One line with the outcome of a finished workload."""
    took = seconds(row.seconds or 0.0)
    if row.status == "failed":
        return f"{plain(row.workload)}: failed after {took}: {plain(row.reason or '')}"
    plan = "" if row.plan is None else f", {'stored ' if row.replayed else ''}plan {row.plan.id}"
    return f"{plain(row.workload)}: {format_speedup(row)}{plan}, {took}"


def format_speedup(row: SweepRow) -> str:
    """The speedup and its interval; `untouched` if nothing was shown to be faster."""
    if row.plan is not None and not row.plan.transforms:
        return "untouched"
    found = row.speedup
    if found is None or found.estimate is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.estimate:.2f}x"
    return f"{found.estimate:.2f}x [{found.low:.2f}, {found.high:.2f}]"


def _cells(row: SweepRow) -> tuple[str, ...]:
    return (
        plain(row.workload),
        row.status if row.plan is None else row.plan.id,
        format_speedup(row),
        plain(row.worker or "-"),
        "-" if row.seconds is None else seconds(row.seconds),
    )


def totals(sweep: Sweep) -> str:
    """The number of workloads that are done, failed, running and waiting, as text."""
    parts = [f"{sweep.count('done')} of {counted(len(sweep.rows), 'workload')} done"]
    for status in ("failed", "running", "waiting"):
        if count := sweep.count(status):
            parts.append(f"{count} {status}")
    return ", ".join(parts)
