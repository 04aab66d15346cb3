"""Renders the content of the plan store in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steadytorch.plan.fingerprint import format_differences
from steadytorch.plan.record import PlanRecord, as_result
from steadytorch.plan.store import Stored
from steadytorch.quantities import counted
from steadytorch.report.text import duration, keep_words_whole, plain, print_indented
from steadytorch.report.tune import name_of, render_left_out, render_plan, render_trials

if TYPE_CHECKING:
    from steadytorch.serve.exchange import Imported, Pushed
    from steadytorch.tune.reverify import Reverified

_WIDE = 100
"""Columns from which the list has a column of its own for inputs."""


def render_list(
    console: Console, entries: Sequence[Stored], root: Path | None, aside: Sequence[Path] = ()
) -> None:
    """Prints a line per plan, then unreadable files and the number of files in quarantine."""
    _render_entries(console, entries, root)
    if aside:
        files = counted(len(aside), "unusable file")
        console.print(Text(f"{files} moved aside to {plain(aside[0].parent)}", "yellow"))


def _render_entries(console: Console, entries: Sequence[Stored], root: Path | None) -> None:
    if not entries:
        console.print(Text(f"no plans in {plain(root)}: make one with steady tune"))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("id", no_wrap=True)
    stacked = console.width < _WIDE
    for heading in (*(["workload\ninputs"] if stacked else ["workload", "inputs"]), "plan"):
        table.add_column(heading, overflow="fold")
    table.add_column("gain", justify="right", no_wrap=True)
    problems = []
    for entry in entries:
        if not isinstance(entry.payload, PlanRecord):
            problems.append(f"{plain(entry.path)}: {plain(entry.problem or 'unreadable')}")
            continue
        plan = entry.payload
        gain = f"{plan.evidence.speedup.estimate:.2f}x" if plan.candidate else "-"
        names = [_named(plan), plain(plan.key.signature)]
        names = ["\n".join(names)] if stacked else names
        table.add_row(*map(Text, (plan.id, *names, name_of(plan.candidate), gain)))
    if table.row_count:
        keep_words_whole(table, console.width, [1] if stacked else [1, 2])
        console.print(table)
    for problem in problems:
        console.print(Text(problem, "yellow"))


def render_show(console: Console, plan: PlanRecord, path: Path) -> None:
    """Prints one plan with all its evidence and its key."""
    console.print(Text(f"{_named(plan)}, {plain(plan.key.signature)}", "bold"))
    result = as_result(plan)
    render_trials(console, result)
    render_left_out(console, result)
    render_plan(console, result, "Plan")
    key = plan.key
    device = _listed({"": key.device, "compute capability": key.compute_capability})
    asked = {"": key.objective, "precision": key.precision, "tolerance": key.tolerance}
    software = {"torch": key.torch, "CUDA": key.cuda, "cuDNN": key.cudnn, "driver": key.driver}
    for name, value in (
        ("made", f"{plan.created} by steadytorch {plan.version}"),
        ("asked", _listed(asked)),
        ("device", f"{key.device_name or 'unknown'} ({device})"),
        ("software", _listed(software)),
        ("file", str(path)),
    ):
        console.print(Padding(Text(f"{name:<9} {plain(value)}", "dim"), (0, 0, 0, 2)))


def render_exported(console: Console, entries: Sequence[Stored], path: Path) -> None:
    """Prints how many plans were exported, and which files were left out."""
    left_out = [entry for entry in entries if entry.problem is not None]
    console.print(Text(f"{counted(len(entries) - len(left_out), 'plan')} in {plain(path)}"))
    for entry in left_out:
        console.print(Text(f"left out: {plain(entry.path)}: {plain(entry.problem)}", "yellow"))


def render_pushed(console: Console, pushed: Sequence[Pushed]) -> None:
    """Prints how many plans were added to the remote store, and how many were already there."""
    added = sum(each.added for each in pushed)
    stayed = sum(each.problem is None for each in pushed) - added
    console.print(Text(f"{counted(added, 'plan')} added, {stayed} already there"))


def render_imported(console: Console, imported: Sequence[Imported]) -> None:
    """Prints for each imported plan whether it is new to the store and fits this machine."""
    for each in imported:
        console.print(_headline(each.plan))
        done = "already stored, left unchanged" if each.kept else "stored"
        print_indented(console, Text(done))
        if each.misfit:
            reason = f"does not fit here: {plain(format_differences(each.misfit))}"
            print_indented(console, Text(reason, "yellow"))
        else:
            print_indented(console, Text("fits this machine", "green"))
    fitting = sum(not each.misfit for each in imported)
    console.print(Text(f"{counted(len(imported), 'plan')}, {fitting} of them for this machine"))


def render_passed_over(console: Console, plan: PlanRecord, reason: str) -> None:
    """Prints a plan that was skipped, and why."""
    console.print(_headline(plan))
    print_indented(console, Text(f"skipped: {plain(reason)}", "yellow"))


def render_reverified(console: Console, result: Reverified) -> None:
    """Prints a plan's gain on this machine, beside its gain in the original search."""
    console.print(_headline(result.plan))
    for line in _worth(result):
        print_indented(console, Text(plain(line)))
    if result.failed is None:
        print_indented(console, Text("holds", "bold green"))
    else:
        advice = f"failed: {plain(result.failed)}; tune again, or remove it with steady plans rm"
        print_indented(console, Text(advice, "bold red"))


def _worth(result: Reverified) -> list[str]:
    if not result.plan.candidate:
        return ["leaves the workload untouched: nothing to verify"]
    lines = []
    if result.error is not None:
        lines.append(f"relative error {result.error:.1e}")
    if result.claim is not None and result.baseline_ns and result.plan_ns:
        claim, before = result.claim, result.plan.evidence.speedup
        now = f"{1 / (1 + claim.estimate):.2f}x as fast as the untouched workload"
        if claim.low is not None and claim.high is not None:
            now += f" (99 % interval {1 / (1 + claim.high):.2f} to {1 / (1 + claim.low):.2f})"
        rounds = f"{claim.processes} fresh processes a side; claim: {claim.claim}"
        lines.append(f"{now}, {rounds}; {before.estimate:.2f}x when it was made")
        lines.append(
            f"{duration(result.plan_ns)}, untouched {duration(result.baseline_ns)} "
            "(medians of blocks)"
        )
    return lines


def _headline(plan: PlanRecord) -> Text:
    facts = f"{_named(plan)}, {plain(plan.key.signature)}: "
    return Text.assemble((plan.id, "bold"), f" {facts}", (name_of(plan.candidate), "bold green"))


def _listed(facts: Mapping[str, object]) -> str:
    """Names with their values as text; names with the value None are left out."""
    known = (f"{name} {value}".lstrip() for name, value in facts.items() if value is not None)
    return ", ".join(known)


def _named(plan: PlanRecord) -> str:
    """The name of a plan's workload, with the suffix `(training)` for a training plan."""
    return plain(plan.name if plan.trains is None else f"{plan.name} (training)")
