"""`steady compare`: compare two workloads, settings or saved results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from steadytorch.cli import INTERRUPTED, completion, options
from steadytorch.errors import UsageError

LEAST_PROCESSES = 3
GATE_PROCESSES = 5

if TYPE_CHECKING:
    from steadytorch.results.compare import CompareResult


@click.command()
@click.argument("a", metavar="A", shell_complete=completion.workloads_or_results)
@click.argument("b", metavar="B", shell_complete=completion.workloads_or_results)
@options.shaping
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Fresh pairs of processes; 3 or more support a claim about the machine.  [default: 1, or "
    "5 with --fail-slower]",
)
@options.budget("Time for the comparison", default="5m")
@options.metric
@click.option(
    "--fail-slower",
    metavar="PERCENT",
    callback=options.fraction,
    help="Exit with 1 if B is slower than A by more than this, with 99 % confidence.",
)
@options.markdown_file
@options.json_file
@options.quiet
def compare(
    a: str,
    b: str,
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    processes: int | None,
    budget: str,
    metric: str,
    fail_slower: float | None,
    markdown_path: Path | None,
    json_path: Path | None,
    quiet: bool,
) -> None:
    """Compare B with A: two workloads, or two results that steady measure --json saved.

    To compare settings of one model, name transforms: resnet50 and
    resnet50@channels_last+inference_mode.
    """
    from msgspec.structs import replace

    from steadytorch.bench.compare import compare_files, compare_live
    from steadytorch.device.facts import load_facts, resolve_device
    from steadytorch.quantities import parse_duration
    from steadytorch.report.compare import markdown, render_compare
    from steadytorch.report.progress import Progress
    from steadytorch.results.saved import to_json

    replicates = _replicates(processes, fail_slower)
    console = options.console(quiet)
    saved = [name.endswith(".json") for name in (a, b)]
    if all(saved):
        _refuse_live_options()
        result, facts = compare_files(a, b)
    elif any(saved):
        raise UsageError("one of A and B is a saved result and the other is not: give two alike")
    else:
        resolved, budget_s = resolve_device(device), parse_duration(budget)
        facts = load_facts(resolved)
        shape = {"batch": batch, "inputs": inputs, "train": train, "seed": seed}
        sides = [
            (*options.load_with_transforms(each, facts, quiet=quiet, **shape), each)
            for each in (a, b)
        ]
        with Progress(console, budget_s, brief=True) as shown:
            result = compare_live(
                *sides,
                processes=replicates,
                metric=metric,
                device=resolved,
                seed=seed,
                budget=budget_s,
                progress=options.teller(console),
                on_pair=lambda number, most: shown.step(
                    f"pair of blocks {number} of at most {most}"
                ),
            )
    failed = fail_slower is not None and result.effect.slower_than(fail_slower)
    result = replace(result, gate_failed=failed)
    render_compare(console, result)
    gate = None if fail_slower is None else _gate(result, fail_slower)
    options.write_json(json_path, to_json(result, result.workload, facts))
    options.write("--markdown", markdown_path, markdown(result, gate).encode())
    _leave(result, gate, failed)


def _leave(result: CompareResult, gate: str | None, failed: bool) -> None:
    from steadytorch.report.text import plain

    if result.interrupted:
        click.echo("steady: interrupted; earlier pairs are above", err=True)
        sys.exit(INTERRUPTED)
    if result.failed is not None:
        click.echo(f"steady: {plain(result.failed)}", err=True)
        sys.exit(1)
    if failed:
        click.echo(f"steady: gate {gate}", err=True)
        sys.exit(1)


def _refuse_live_options() -> None:
    """Raises a usage error for options that apply to live comparisons only."""
    context = click.get_current_context()
    for name in ("metric", "processes", "budget", "batch", "inputs", "train", "seed", "device"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = "--input" if name == "inputs" else f"--{name}"
            raise UsageError(
                f"{option} is for live comparisons: saved results are compared as taken"
            )


def _gate(result: CompareResult, fail_slower: float) -> str:
    if result.effect.low is None:
        return "not answered: no interval may be claimed"
    if result.effect.slower_than(fail_slower):
        return f"failed: slower by more than {fail_slower:.2%}"
    return f"passed: not shown to be slower by more than {fail_slower:.2%}"


def _replicates(asked: int | None, fail_slower: float | None) -> int:
    """Returns the number of pairs of processes.

    `--fail-slower` needs several pairs, because processes of one program differ by percents.
    """
    if fail_slower is None:
        return asked or 1
    if asked is not None and asked < LEAST_PROCESSES:
        raise UsageError(
            f"--fail-slower with --processes {asked}: a gate needs {LEAST_PROCESSES} or more, "
            "because processes of one program differ"
        )
    return asked or GATE_PROCESSES
