"""`steady demo`: the main job on a bundled network."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from steadytorch.cli import options

_MODEL = "resnet50"
_BATCH = 1
_EXPLAIN = "10s"


@click.command()
@click.option("--budget", default="150s", show_default=True, help="Time for the search.")
@options.device
@options.store
@options.json_file
@options.quiet
def demo(budget: str, device: str, store: Path | None, json_path: Path | None, quiet: bool) -> None:
    """Explains and tunes a bundled ResNet-50 with random weights; nothing is downloaded."""
    from rich.text import Text

    from steadytorch.cli.tune import run
    from steadytorch.device.facts import resolve_device
    from steadytorch.explain.session import explain
    from steadytorch.quantities import parse_duration
    from steadytorch.report.explain import render_explain
    from steadytorch.report.text import plain
    from steadytorch.tune.select import Options
    from steadytorch.tune.session import Session

    console = options.console(quiet)
    loaded = options.load(_MODEL, batch=_BATCH, inputs=(), train=False, seed=0)
    session = Session(loaded, Options(budget_s=parse_duration(budget)), device, store)
    console.print(
        f"{_MODEL}, batch {_BATCH}, random weights. First: where does its time go?", style="bold"
    )
    found = explain(
        loaded, device=resolve_device(device), budget=_EXPLAIN, progress=options.teller(console)
    )
    render_explain(console, _MODEL, found, False)
    console.print("\nNow: what makes it faster?", style="bold")
    console.print(
        "Each candidate runs in a process of its own, is checked against float64, and is timed in "
        f"random order beside the others. The search takes up to {budget}."
    )
    plan = run(session, "tune", console, json_path)
    on = "" if device == "auto" else f" --device {device}"
    at = "" if store is None else f" --store {shlex.quote(plain(store))}"
    replay = f"steady tune {_MODEL} --batch {_BATCH}{on}{at}"
    show = f"steady plans show {plan.id}{at}"
    console.print(Text.assemble("\nNext: ", (replay, "bold"), " replays this plan;"))
    console.print(Text.assemble("      ", (show, "bold"), " shows all of its evidence."))
