"""`steady tune`: find, verify and store the fastest plan for a workload."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steadytorch.cli import INTERRUPTED, completion, options
from steadytorch.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from steadytorch.results.tune import TuneReport
    from steadytorch.tune.session import Session

OF_A_LIST = ("folder", "shard", "status", "retry", "submit", "partition", "slurm")
"""Parameters that need `--list`."""


@click.command()
@click.argument(
    "workload", metavar="[WORKLOAD]", required=False, shell_complete=completion.workloads
)
@options.shaping
@click.option(
    "--objective",
    type=click.Choice(["auto", "latency", "p99", "throughput", "contended"]),
    default="auto",
    show_default=True,
    help="The time to minimise; auto: latency of inference, throughput of training; contended: p99 "
    "beside a process that keeps one CPU core busy.",
)
@click.option(
    "--precision",
    type=click.Choice(["same", "tf32", "bf16", "fp16", "int8"]),
    default="same",
    show_default=True,
    help="Lowest precision allowed.",
)
@click.option("--tolerance", type=float, help="Relative L2 error allowed for a lower precision.")
@options.budget("Time for the search", default="3m")
@click.option("--max-memory", metavar="SIZE", help="Cap on peak memory, such as 8GiB.")
@click.option(
    "--devices",
    metavar="LIST",
    help="GPUs of one kind that share the search, such as cuda:0,cuda:1, or all: every idle one of "
    "the kind of --device (see the guide Ranks).  [default: one device]",
)
@options.store
@click.option(
    "--mode",
    type=click.Choice(["replay", "tune", "strict"]),
    default="replay",
    show_default=True,
    help="replay: use a stored plan, else search; tune: always search; strict: use a stored "
    "plan, else fail.",
)
@click.option(
    "--bundle",
    is_flag=True,
    help="Also keep compiled code, for faster cold starts (see the guide Serving).",
)
@click.option("--all", "everything", is_flag=True, help="Show the table of all candidates.")
@click.option(
    "--list",
    "list_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Tune every WORKLOAD of a list, one a line with its options; any number of processes "
    "share the work (see the guide Ranks).",
)
@click.option(
    "--sweep",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder that the processes of a list share.  [default: FILE.sweep]",
)
@click.option(
    "--shard",
    default="auto",
    show_default=True,
    metavar="auto|K/N",
    help="Part of a list to begin with; auto: from SLURM, Kubernetes or torchrun.",
)
@click.option("--status", is_flag=True, help="Show the table of a list, and do no work.")
@click.option("--retry", is_flag=True, help="Forget the failures of a list first; for one worker.")
@click.option(
    "--submit",
    type=click.IntRange(min=1, max=10_000),
    metavar="N",
    help="Submit N jobs for a list to SLURM, and return (pip install 'steadytorch[slurm]').",
)
@click.option("--partition", metavar="NAME", help="SLURM partition of these jobs.")
@click.option(
    "--slurm",
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of submitit, such as gpus_per_node=1 or slurm_account=x; repeat for several.",
)
@options.json_file
@options.quiet
@click.pass_context
def tune(
    ctx: click.Context,
    workload: str | None,
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    objective: str,
    precision: str,
    tolerance: float | None,
    budget: str,
    max_memory: str | None,
    devices: str | None,
    store: Path | None,
    mode: str,
    bundle: bool,
    everything: bool,
    list_path: Path | None,
    folder: Path | None,
    shard: str,
    status: bool,
    retry: bool,
    submit: int | None,
    partition: str | None,
    slurm: tuple[str, ...],
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Find the fastest steady way to run WORKLOAD here, verify it, and store it as a plan.

    WORKLOAD is a bundled name (resnet18, resnet50, mobilenet_v3_large, vit_b_16, unet, gpt2),
    torchvision:NAME, timm:NAME, transformers:NAME, path/to/file.py:factory or
    package.module:factory.
    """
    if list_path is not None:
        from steadytorch.cli.sweep import sweep

        if devices is not None:
            raise UsageError("--devices does not apply to --list: start one worker per device")
        sweep(ctx)
        return
    options.refuse_without(ctx, "--list", OF_A_LIST)
    if workload is None:
        raise click.MissingParameter(ctx=ctx, param_hint="'WORKLOAD'", param_type="argument")
    from steadytorch.quantities import parse_bytes, parse_duration
    from steadytorch.report.text import plain
    from steadytorch.tune.search_server import started_in_advance

    budget_s = parse_duration(budget)
    max_memory_bytes = None if max_memory is None else parse_bytes(max_memory)
    may_search = mode != "strict" and devices is None  # several devices are not counted yet
    with started_in_advance(workload) if may_search else nullcontext() as server:
        # Imported here because they import PyTorch, which the server now does too.
        from steadytorch.tune.devices import choose_devices
        from steadytorch.tune.select import SearchOptions
        from steadytorch.tune.session import Session

        asked = SearchOptions(
            objective=objective,
            precision=precision,
            tolerance=tolerance,
            budget_s=budget_s,
            max_memory_bytes=max_memory_bytes,
            seed=seed,
        )
        loaded = options.load(workload, batch=batch, inputs=inputs, train=train, seed=seed)
        console = options.console(quiet)
        chosen = None
        if devices is not None:
            chosen = choose_devices(devices, device, device)
            for note in chosen.notes:
                console.print(f"  {plain(note)}", style="yellow")
        session = Session(loaded, asked, device, store, devices=chosen, server=server)
        plan = run(session, mode, console, json_path, store, everything=everything)
    if bundle:
        console.print("  keeping compiled code", style="dim")
        reason = session.keep_bundle(plan)
        console.print(
            f"  no bundle: {plain(reason)}" if reason else "  bundle kept beside the plan"
        )


def run(
    session: Session,
    mode: str,
    console: Console,
    json_path: Path | None,
    store: Path | None,
    *,
    everything: bool = False,
    brief: bool = False,
) -> Any:
    """Replays a stored plan or searches for one, prints the result and writes the JSON.

    Args:
        session: the workload and its options.
        mode: `replay`, `tune` or `strict`.
        console: where to print.
        json_path: the file for the JSON; None to write none.
        store: the option `--store`, for the suggested command.
        everything: print all candidates instead of the summary.
        brief: print no line per candidate while the search runs.

    Returns:
        The plan.

    Raises:
        PlanError: mode `strict`, and the store has no plan.
    """
    from rich.text import Text

    from steadytorch.plan.record import as_result
    from steadytorch.report.progress import Progress
    from steadytorch.report.text import plain
    from steadytorch.report.tune import render_missing, render_plan
    from steadytorch.results.saved import to_json

    name, facts = session.workload.name, session.facts
    where = f"{facts.name or facts.device}, {session.key.signature}"
    step = ", a training step," if session.workload.is_training else ""
    console.print(Text.assemble((plain(name), "bold"), f"{step} on {plain(where)}"))
    plan, reason = session.find(mode)
    if plan is not None:
        stored = as_result(plan)
        if everything:
            _render_all(console, stored)
        render_plan(console, stored, "Stored plan")
        console.print("  replayed; search anew with --mode tune")
        render_missing(console, stored)
        options.write_json(json_path, to_json(stored, name, facts))
        return plan
    if reason:
        console.print(Text(plain(reason), "dim"))
    with Progress(console, session.options.budget_s, brief) as progress:
        found = session.search(progress)
    plan = None if found.interrupted else session.keep(found, anew=mode == "tune")
    of = {"inputs": session.key.signature, "trains": session.workload.is_training}
    result = found.as_result(plan, **of)
    kept = None if plan is None else as_result(plan)
    console.print()
    _render(console, result, kept, store, everything)
    options.write_json(json_path, to_json(result, name, facts))
    if plan is None:
        click.echo("steady: interrupted; earlier measurements are above", err=True)
        sys.exit(INTERRUPTED)
    return plan


def _render(
    console: Console,
    result: TuneReport,
    kept: TuneReport | None,
    store: Path | None,
    everything: bool,
) -> None:
    from steadytorch.report.tune import (
        render_interrupted,
        render_missing,
        render_plan,
        render_summary,
    )

    if everything:
        _render_all(console, result)
    if kept is None:
        if not everything:
            render_interrupted(console, result)
        return
    if kept.chosen != result.chosen:
        found = "another process stored it first" if result.chosen else "this search found none"
        console.print(f"  kept the stored plan: {found}")
    if everything:
        render_plan(console, kept, "Plan")
    else:
        render_summary(console, result, kept, options.repeated(store))
    render_missing(console, result)


def _render_all(console: Console, result: TuneReport) -> None:
    from steadytorch.report.tune import render_left_out, render_trials

    render_trials(console, result)
    render_left_out(console, result)
