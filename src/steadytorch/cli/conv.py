"""`steady conv`: which engine of cuDNN runs each convolution, and what others would take."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options
from steadytorch.errors import UsageError


@click.command()
@options.workload
@click.option(
    "--layer", type=click.IntRange(min=1), metavar="N", help="All engines of row N of the table."
)
@click.option("--budget", default="60s", show_default=True, help="Time for choosing engines.")
@click.option("--deterministic", is_flag=True, help="Only engines that give the same bits always.")
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
    """Measures every engine that cuDNN has for each convolution of WORKLOAD.

    WORKLOAD is as for steady measure: WORKLOAD@cast_weights(fp16)+channels_last shows the engines
    for that element type and layout. With --train there is a row for each pass of a training step:
    forward, the gradient by the input and the gradient by the weight.

    What was chosen before on this kind of device, here or by steady tune, stays unless another
    engine is shown to be clearly faster; what is chosen is kept in the plan store for next time.
    """
    from steadytorch.device.facts import load_facts
    from steadytorch.quantities import parse_duration
    from steadytorch.report.conv import render_conv, render_layer
    from steadytorch.report.documents import conv_document
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
    options.write_json(json_path, conv_document(workload, facts, report))
    if layer is not None and layer > count:
        raise UsageError(f"--layer {layer}: the table of {workload} has {count} rows")
