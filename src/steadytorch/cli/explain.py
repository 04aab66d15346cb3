"""`steady explain`: find where time and variability go, and suggest fixes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steadytorch.cli import INTERRUPTED, completion, options
from steadytorch.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from steadytorch.results.explain import Explanation

TRACES = (".json", ".json.gz")


@click.command()
@click.argument(
    "subjects",
    nargs=-1,
    required=True,
    metavar="WORKLOAD|TRACE...",
    shell_complete=completion.workloads_or_results,
)
@options.shaping
@options.budget("Total time for sampling", default="20s")
@click.option(
    "--steps",
    default=5,
    show_default=True,
    type=click.IntRange(min=1, max=1000),
    help="Most steps to profile.",
)
@click.option(
    "--pause",
    metavar="TIME",
    help="Pause between calls in production, such as 100ms.  [default: none]",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Show all findings and evidence, and why rules abstained.",
)
@options.json_file
@options.quiet
def explain(
    subjects: tuple[str, ...],
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    budget: str,
    steps: int,
    pause: str | None,
    everything: bool,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Find where time and variability go in WORKLOAD, or in the steps of TRACE.

    WORKLOAD takes the forms that steady measure takes. TRACE is a .json or .json.gz file of
    PyTorch's profiler; reading it runs no code of the workload. Several traces, one for each rank
    of a job, are compared: who is late, in what, at which steps.
    """
    subject, *others = subjects
    if others:
        _compare(subjects, options.console(quiet), everything, json_path)
        return
    from steadytorch.report.explain import render_explain
    from steadytorch.report.text import plain
    from steadytorch.results.saved import to_json

    console = options.console(quiet)
    if is_trace(subject):
        _refuse_run_options()
        result = _read(subject, console)
    else:
        shape = {"batch": batch, "inputs": inputs, "train": train, "seed": seed}
        asked = {"budget": budget, "steps": steps, "pause": pause}
        result = _run(subject, shape, device, console, asked)
    name = Path(subject).name if is_trace(subject) else subject
    render_explain(console, name, result, everything)
    options.write_json(json_path, to_json(result, subject, result.environment))
    if result.interrupted:
        click.echo("steady: interrupted; complete parts are above", err=True)
        sys.exit(INTERRUPTED)
    if result.failed is not None:
        click.echo(f"steady: the workload failed while timed: {plain(result.failed)}", err=True)
        sys.exit(1)


def _compare(
    subjects: tuple[str, ...], console: Console, everything: bool, json_path: Path | None
) -> None:
    """Compares the traces of several ranks."""
    from steadytorch.explain.session import explain as explained
    from steadytorch.report.ranks import render_ranks
    from steadytorch.results.saved import to_json

    for subject in subjects:
        if not is_trace(subject):
            raise UsageError(
                f"{subject!r} is not a trace (.json, .json.gz): pass one workload, or traces of "
                "the ranks of one job"
            )
    _refuse_run_options()
    result = explained([*subjects], progress=options.teller(console))
    render_ranks(console, result, everything)
    options.write_json(json_path, to_json(result, " ".join(subjects), result.environment))


def is_trace(subject: str) -> bool:
    """Whether `subject` is a trace file rather than a workload, judged by the file ending."""
    return subject.endswith(TRACES)


def _read(path: str, console: Console) -> Explanation:
    from steadytorch.explain.session import explain as explained

    return explained(Path(path), progress=options.teller(console))


def _run(
    name: str, shape: dict[str, Any], device: str, console: Console, asked: dict[str, Any]
) -> Explanation:
    from steadytorch.device.facts import load_facts, resolve_device
    from steadytorch.explain.session import explain as explained

    resolved = resolve_device(device)
    facts = load_facts(resolved)
    loaded, candidate = options.load_with_transforms(name, facts, quiet=console.quiet, **shape)
    tell = options.teller(console)
    return explained(loaded, device=resolved, candidate=candidate, progress=tell, **asked)


def _refuse_run_options() -> None:
    """Raises a usage error for options that do not apply to trace files."""
    context = click.get_current_context()
    for name in ("batch", "inputs", "device", "train", "seed", "budget", "steps", "pause"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = "--input" if name == "inputs" else f"--{name}"
            raise UsageError(f"{option} is for workloads: a trace file is read as it is")
