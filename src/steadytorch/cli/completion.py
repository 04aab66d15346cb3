"""Shell completion of workloads and plan ids, without importing PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem


def workloads(
    ctx: click.Context, parameter: click.Parameter, incomplete: str, *endings: str
) -> list[CompletionItem]:
    """Completes the names of bundled workloads, Python files and folders.

    Args:
        ctx: the command so far.
        parameter: the argument or option to complete.
        incomplete: the text of the parameter so far.
        endings: endings of files that are offered beside `.py`.
    """
    from steadytorch.workload.bundled import names

    found = [name for name in names() if name.startswith(incomplete)]
    files, folders = _entries(incomplete, (".py", *endings))
    if not found and not files and folders:
        # The shell completes folders itself, without a blank after them.
        return [CompletionItem(incomplete, type="dir")]
    return [CompletionItem(each) for each in (*found, *files, *folders)]


def workloads_or_results(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes workloads as `workloads` does, and JSON files: saved results and traces."""
    return workloads(ctx, parameter, incomplete, ".json", ".json.gz")


def plan_ids(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes the ids of plans in the store given by `--store`; the help names the workload."""
    from steadytorch.plan.record import PlanRecord
    from steadytorch.plan.store import Store

    entries = Store(ctx.params.get("store"), second="").entries(PlanRecord)
    return [
        CompletionItem(entry.payload.id, help=entry.payload.name)
        for entry in entries
        if entry.key is not None and entry.payload.id.startswith(incomplete)
    ]


def _entries(incomplete: str, endings: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Lists files with one of the `endings`, and folders, whose path starts with `incomplete`."""
    head, start = os.path.split(incomplete)
    try:
        entries = sorted(Path(head or ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return [], []
    shown = [e for e in entries if e.name.startswith(start) and not e.name.startswith(".")]
    folders = [f"{os.path.join(head, each.name)}/" for each in shown if each.is_dir()]
    files = [
        os.path.join(head, each.name)
        for each in shown
        if each.name.endswith(endings) and not each.is_dir()
    ]
    return files, folders
