"""`steady tune`: search, verify, store the plan, say what it gains and when it pays back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steadytorch.cli import INTERRUPTED, options
from steadytorch.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from steadytorch.tune.session import Session


@click.command()
@options.workload
@click.option(
    "--objective",
    type=click.Choice(["latency", "p99", "throughput"]),
    default="latency",
    show_default=True,
    help="What to make fast.",
)
@click.option(
    "--precision",
    type=click.Choice(["same", "tf32", "bf16", "fp16"]),
    default="same",
    show_default=True,
    help="How far numerics may move.",
)
@click.option("--tolerance", type=float, help="Relative L2 error allowed for a lower precision.")
@click.option("--budget", default="3m", show_default=True, help="Time for the search.")
@click.option("--max-memory", metavar="SIZE", help="Cap on peak memory, such as 8GiB.")
@options.store
@click.option(
    "--mode",
    type=click.Choice(["replay", "tune", "strict"]),
    default="replay",
    show_default=True,
    help="replay: take a stored plan, search where there is none; tune: always search; "
    "strict: only take a stored plan, fail without one.",
)
@click.option(
    "--bundle",
    is_flag=True,
    help="Also keep what the plan compiles, for a fast start of who asks for it (see "
    "docs/production.md).",
)
@options.json_file
@options.quiet
def tune(
    workload: str,
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
    store: Path | None,
    mode: str,
    bundle: bool,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Finds the fastest steady way to run WORKLOAD here, verifies it and stores it as a plan.

    WORKLOAD is a bundled name (resnet18, resnet50, mobilenet_v3_large, vit_b_16, unet, gpt2),
    torchvision:NAME, timm:NAME, transformers:NAME, path/to/file.py:factory or
    package.module:factory.
    """
    from steadytorch.quantities import parse_bytes, parse_duration
    from steadytorch.report.text import plain
    from steadytorch.tune.select import Options
    from steadytorch.tune.session import Session

    asked = Options(
        objective=objective,
        precision=precision,
        tolerance=tolerance,
        budget_s=parse_duration(budget),
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory),
        seed=seed,
    )
    loaded = options.load(workload, batch=batch, inputs=inputs, train=train, seed=seed)
    session = Session(loaded, asked, device, store)
    console = options.console(quiet)
    plan = run(session, mode, console, json_path)
    if bundle:
        console.print("  keeping what it compiles", style="dim")
        reason = session.keep_bundle(plan)
        console.print(
            f"  no bundle: {plain(reason)}" if reason else "  bundle kept beside the plan"
        )


def run(session: Session, mode: str, console: Console, json_path: Path | None) -> Any:
    """Replays or searches, shows the outcome and writes the JSON.

    Returns:
        The plan.

    Raises:
        PlanError: mode `strict` and nothing is stored.
    """
    from rich.text import Text

    from steadytorch.report.documents import replay_document, tune_document
    from steadytorch.report.progress import Progress
    from steadytorch.report.text import plain
    from steadytorch.report.tune import render_left_out, render_plan, render_trials

    name, facts = session.workload.name, session.facts
    where = f"{facts.name or facts.device}, {session.key.signature}"
    step = ", a training step," if session.workload.is_training else ""
    console.print(Text.assemble((plain(name), "bold"), f"{step} on {plain(where)}"))
    if mode != "tune":
        plan, reason = session.look_up()
        if plan is not None:
            render_plan(console, plan, "Stored plan")
            console.print("  replayed; search anew with --mode tune")
            options.write_json(json_path, replay_document(name, facts, plan))
            return plan
        if mode == "strict":
            raise PlanError(f"no stored plan for {name}: {reason}")
        console.print(Text(plain(reason), "dim"))
    of = {"inputs": session.key.signature, "trains": session.workload.is_training}
    with Progress(console, session.options.budget_s) as progress:
        result = session.search(progress)
    if result.interrupted:
        render_trials(console, result.candidates, None)
        options.write_json(json_path, tune_document(name, facts, result, None, **of))
        click.echo("steady: interrupted; what was measured until then is above", err=True)
        sys.exit(INTERRUPTED)
    plan = session.keep(result, anew=mode == "tune")
    console.print()
    render_trials(console, result.candidates, result.chosen)
    render_left_out(console, plan.evidence)
    if plan.candidate != result.chosen:
        console.print("  kept the plan that another process stored first")
    render_plan(console, plan, "Plan")
    options.write_json(json_path, tune_document(name, facts, result, plan, **of))
    return plan
