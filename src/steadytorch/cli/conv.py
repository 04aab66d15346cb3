"""`steady conv`: choose the cuDNN engine of each convolution by measurement."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options
from steadytorch.errors import UsageError


@click.command()
@options.workload
@click.option(
    "--layer",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show all engines of row N of the table.",
)
@options.budget("Time for choosing engines", default="60s")
@click.option(
    "--deterministic", is_flag=True, help="Only engines that give the same bits on every run."
)
@options.store
@options.json_file
@options.quiet
def conv(
    workload: str,
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    layer: int | None,
    budget: str,
    deterministic: bool,
    store: Path | None,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Measure all cuDNN engines for each convolution of WORKLOAD, and choose one.

    WORKLOAD takes the forms that steady measure takes. WORKLOAD@cast_weights(fp16)+channels_last
    shows the engines for that dtype and layout. --train adds a row for each pass of a training
    step: forward, gradient by the input, gradient by the weight.

    The plan store keeps the choices. A later run on this kind of device starts from them, and
    replaces one only if another engine is clearly faster.
    """
    from steadytorch.device.facts import load_facts
    from steadytorch.quantities import parse_duration
    from steadytorch.report.conv import render_conv, render_layer
    from steadytorch.results.saved import to_json
    from steadytorch.tune.engines import conv as choose
    from steadytorch.tune.engines import resolve_cuda

    budget_s = parse_duration(budget)
    resolved = resolve_cuda(device)
    facts = load_facts(resolved)
    shape = {"batch": batch, "inputs": inputs, "train": train, "seed": seed}
    loaded, candidate = options.load_with_transforms(workload, facts, quiet=True, **shape)
    console = options.console(quiet)
    report = choose(
        loaded,
        candidate=candidate,
        budget=budget_s,
        deterministic=deterministic,
        device=resolved,
        store=store,
        progress=options.teller(console),
    )
    count = len(report.layers)
    if layer is None:
        render_conv(console, workload, report)
    elif layer <= count:
        render_layer(console, report.layers[layer - 1])
    options.write_json(json_path, to_json(report, workload, facts))
    if layer is not None and layer > count:
        raise UsageError(f"--layer {layer}: the table of {workload} has {count} rows")
