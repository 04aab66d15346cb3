"""`steady measure`: measure how fast and how steady a workload runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from steadytorch.cli import INTERRUPTED, options


@click.command()
@options.workload
@click.option(
    "--processes",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Fresh processes; 3 or more support a claim about the machine.",
)
@options.budget("Total time for sampling", default="20s")
@options.json_file
@options.quiet
def measure(
    workload: str,
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    processes: int,
    budget: str,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Measure how fast and how steady WORKLOAD runs.

    WORKLOAD takes the forms that steady tune lists. WORKLOAD@TRANSFORM+TRANSFORM applies
    transforms, such as resnet50@channels_last+inference_mode.
    """
    from steadytorch.bench.measure import measure as take
    from steadytorch.device.facts import load_facts, resolve_device
    from steadytorch.report.measure import render_measure
    from steadytorch.report.text import plain
    from steadytorch.results.saved import to_json

    resolved = resolve_device(device)
    facts = load_facts(resolved)
    shape = {"batch": batch, "inputs": inputs, "train": train, "seed": seed}
    loaded, candidate = options.load_with_transforms(workload, facts, quiet=quiet, **shape)
    console = options.console(quiet)
    result = take(
        loaded,
        processes=processes,
        budget=budget,
        device=resolved,
        candidate=candidate,
        progress=options.teller(console),
    )
    render_measure(console, workload, result)
    options.write_json(json_path, to_json(result, workload, facts))
    if result.interrupted:
        click.echo("steady: interrupted; earlier measurements are above", err=True)
        sys.exit(INTERRUPTED)
    if result.failed is not None:
        click.echo(f"steady: the workload failed while timed: {plain(result.failed)}", err=True)
        sys.exit(1)
