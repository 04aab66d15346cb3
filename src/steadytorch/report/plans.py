"""The plan store in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steadytorch.plan.plan import Plan
from steadytorch.plan.store import Stored
from steadytorch.report.text import plain
from steadytorch.report.tune import name_of, render_left_out, render_plan, render_trials


def render_list(console: Console, entries: Sequence[Stored], root: Path | None) -> None:
    """A line per plan; files that are none, with the problem."""
    if not entries:
        console.print(Text(f"no plans in {plain(root)}: make one with steady tune"))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("id", "workload", "inputs"):
        table.add_column(heading, overflow="fold")
    table.add_column("plan", ratio=1, overflow="fold")
    table.add_column("gain", justify="right", no_wrap=True)
    problems = []
    for entry in entries:
        if not isinstance(entry.payload, Plan):
            problems.append(f"{plain(entry.path)}: {plain(entry.problem or 'unreadable')}")
            continue
        plan = entry.payload
        gain = f"{plan.evidence.speedup.estimate:.2f}x" if plan.candidate else "-"
        cells = (
            plan.id,
            plain(plan.name),
            plain(plan.key.signature),
            name_of(plan.candidate),
            gain,
        )
        table.add_row(*map(Text, cells))
    if table.row_count:
        console.print(table)
    for problem in problems:
        console.print(Text(problem, "yellow"))


def render_show(console: Console, plan: Plan, path: Path) -> None:
    """One plan with all its evidence and its key."""
    console.print(Text(f"{plain(plan.name)}, {plain(plan.key.signature)}", "bold"))
    render_trials(console, plan.evidence.trials, plan.candidate)
    render_left_out(console, plan.evidence)
    render_plan(console, plan, "Plan")
    key = plan.key
    for name, value in (
        ("made", f"{plan.created} by steadytorch {plan.version}"),
        ("asked", f"{key.objective}, precision {key.precision}, tolerance {key.tolerance}"),
        (
            "device",
            f"{key.device_name} ({key.device}, compute capability {key.compute_capability})",
        ),
        ("software", f"torch {key.torch}, CUDA {key.cuda}, cuDNN {key.cudnn}, driver {key.driver}"),
        ("file", str(path)),
    ):
        console.print(Padding(Text(f"{name:<9} {plain(value)}", "dim"), (0, 0, 0, 2)))
