"""`steady gate`: compare the working tree with a base revision, for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from steadytorch.cli import INTERRUPTED, completion, options

if TYPE_CHECKING:
    from steadytorch.results.gate import GateResult


@click.command()
@click.argument(
    "workloads", metavar="WORKLOAD...", nargs=-1, required=True, shell_complete=completion.workloads
)
@click.option(
    "--base", required=True, metavar="REV", help="Revision to compare with, such as origin/main."
)
@options.shaping
@click.option(
    "--threshold",
    default="1%",
    show_default=True,
    metavar="PERCENT",
    callback=options.fraction,
    help="Fail if a workload is slower by more than this, with confidence.",
)
@click.option(
    "--processes",
    default=40,
    show_default=True,
    type=click.IntRange(min=5),
    help="Most fresh pairs of processes for each workload.",
)
@options.budget("Total time")
@options.metric
@click.option("--base-env", metavar="PYTHON", help="Python executable for the base.")
@click.option(
    "--install", is_flag=True, help="Install each side into a virtual environment of its own."
)
@options.markdown_file
@options.json_file
@options.quiet
def gate(
    workloads: tuple[str, ...],
    base: str,
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    threshold: float,
    processes: int,
    budget: str | None,
    metric: str,
    base_env: str | None,
    install: bool,
    markdown_path: Path | None,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Compare each WORKLOAD of the working tree with that of a base revision.

    Both sides run in fresh processes from their own trees, block by block in random order. Exits
    with 1 if a workload is slower beyond the threshold, and with 2 if one cannot be timed.
    """
    from steadytorch.bench.gate import gate as judged
    from steadytorch.device.facts import load_facts, resolve_device
    from steadytorch.report.gate import markdown, render_gate
    from steadytorch.results.saved import to_json

    resolved = resolve_device(device)
    console = options.console(quiet)
    result = judged(
        workloads,
        base=base,
        base_env=base_env,
        install=install,
        threshold=threshold,
        processes=processes,
        budget=budget,
        metric=metric,
        batch=batch,
        inputs=inputs,
        train=train,
        device=resolved,
        seed=seed,
        progress=options.teller(console),
    )
    render_gate(console, result)
    options.write_json(json_path, to_json(result, result.workload, load_facts(resolved)))
    options.write("--markdown", markdown_path, markdown(result).encode())
    _leave(result, quiet)


def _leave(result: GateResult, quiet: bool) -> None:
    from steadytorch.report.gate import headline
    from steadytorch.report.text import plain

    if result.interrupted:
        click.echo("steady: interrupted; earlier processes are above", err=True)
        sys.exit(INTERRUPTED)
    if result.gate_failed:
        if quiet:  # else the headline above says it
            click.echo(f"steady: gate {headline(result)}", err=True)
        sys.exit(1)
    for row in result.failed:
        click.echo(f"steady: {plain(row.workload)}: {plain(row.reason)}", err=True)
    if result.failed:
        sys.exit(2)
