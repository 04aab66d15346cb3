"""`steady conv`: which engine of cuDNN runs each convolution, and what others would take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from steadytorch.cli import options
from steadytorch.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from steadytorch.transforms.base import Candidate
    from steadytorch.workload.workload import Workload

_OF_A_TRAINING_STEP = ("autocast", "cast_weights", "channels_last", "tf32")


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
    from steadytorch.device.facts import load_facts, resolve_device
    from steadytorch.plan.store import Store
    from steadytorch.process.worker import WorkerFault
    from steadytorch.quantities import parse_duration
    from steadytorch.report.conv import render_conv, render_layer
    from steadytorch.report.documents import conv_document
    from steadytorch.tune.conv import choose_and_keep

    budget_s = parse_duration(budget)
    resolved = resolve_device(device)
    if not resolved.startswith("cuda"):
        raise UnsupportedError("steady conv needs a CUDA device: engines of cuDNN run on no other")
    facts = load_facts(resolved)
    shape = {"batch": batch, "inputs": inputs, "train": train, "seed": seed}
    loaded, prefix = options.load_with_transforms(workload, facts, quiet=True, **shape)
    _check_prefix(loaded, prefix)
    console = options.console(quiet)
    options.teller(console)("choosing engines in a worker process")
    try:
        report = choose_and_keep(
            loaded,
            facts,
            Store(store),
            prefix=prefix,
            device=resolved,
            deadline_s=budget_s,
            deterministic=deterministic,
        )
    except WorkerFault as fault:
        raise UnsupportedError(f"engines cannot be chosen for {workload}: {fault.reason}") from None
    count = len(report.layers)
    if layer is None:
        render_conv(console, workload, report)
    elif layer <= count:
        render_layer(console, report.layers[layer - 1])
    options.write_json(json_path, conv_document(workload, facts, report))
    if layer is not None and layer > count:
        raise UsageError(f"--layer {layer}: the table of {workload} has {count} rows")


def _check_prefix(workload: Workload, prefix: Candidate) -> None:
    """Refuses transforms under which a training step has no gradients, or the same engines.

    Raises:
        UsageError: there is one.
    """
    for spec in prefix if workload.is_training else ():
        if spec.name not in _OF_A_TRAINING_STEP:
            raise UsageError(
                f"{spec} with {workload.name}: engines of a training step depend on its element "
                f"type and layout; use {', '.join(_OF_A_TRAINING_STEP)}"
            )
