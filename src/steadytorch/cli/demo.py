"""`steady demo`: explain and tune a bundled network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from steadytorch.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from steadytorch.results.explain import Explanation

_MODEL = "resnet50"
_BATCH = 1
_EXPLAIN = "10s"


@click.command()
@options.budget("Time for the search", default="150s")
@options.device
@options.store
@click.option(
    "--all", "everything", is_flag=True, help="Show progress, all findings and all candidates."
)
@options.json_file
@options.quiet
def demo(
    budget: str,
    device: str,
    store: Path | None,
    everything: bool,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Explain and tune a bundled ResNet-50 with random weights. Downloads nothing."""
    from steadytorch.cli.tune import run
    from steadytorch.device.facts import resolve_device
    from steadytorch.explain.session import explain
    from steadytorch.quantities import parse_duration
    from steadytorch.tune.select import SearchOptions
    from steadytorch.tune.session import Session

    console = options.console(quiet)
    loaded = options.load(_MODEL, batch=_BATCH, inputs=(), train=False, seed=0)
    session = Session(loaded, SearchOptions(budget_s=parse_duration(budget)), device, store)
    introduce(console)
    tell = options.teller(console) if everything else options.silent
    found = explain(loaded, device=resolve_device(device), budget=_EXPLAIN, progress=tell)
    show_explanation(console, found, everything)
    announce_search(console, budget)
    run(session, "tune", console, json_path, store, everything=everything, brief=not everything)
    suggest(console, device, store)


def introduce(console: Console) -> None:
    """Prints the workload and announces the profiling."""
    console.print(f"{_MODEL}, batch {_BATCH}, random weights", style="bold")
    console.print(f"1. Where does its time go? Profiling for about {_EXPLAIN}.")


def show_explanation(console: Console, found: Explanation, everything: bool) -> None:
    """Prints the explanation, in full if `everything`, else in brief."""
    from steadytorch.report.explain import render_brief, render_explain

    if everything:
        render_explain(console, _MODEL, found, everything=True)
    else:
        render_brief(console, _MODEL, found)


def announce_search(console: Console, budget: str) -> None:
    """Announces the search."""
    console.print(
        f"\n2. What makes it faster? Searching for up to {budget}, verified against float64."
    )


def suggest(console: Console, device: str, store: Path | None) -> None:
    """Prints the `steady tune` command that replays the plan."""
    from rich.text import Text

    on = "" if device == "auto" else f" --device {device}"
    replay = f"steady tune {_MODEL} --batch {_BATCH}{on}{options.repeated(store)}"
    console.print(Text.assemble("\nReplay: ", (replay, "bold")), soft_wrap=True)
