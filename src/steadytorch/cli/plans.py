"""`steady plans`: list, show, verify, exchange and remove stored plans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from steadytorch.cli import completion, options
from steadytorch.errors import PlanError, SteadyError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console

    from steadytorch.plan.store import Store
    from steadytorch.serve.plan import Plan
    from steadytorch.tune.reverify import Reverified


@click.group()
def plans() -> None:
    """List, show, verify, exchange and remove stored plans.

    ID is the id of a plan, as `steady plans list` shows it, or its first digits.

    These commands use the local store. On a miss, steady tune and the library also ask the
    store at the URL in STEADYTORCH_SECOND_STORE, and copy its plan.
    """


@plans.command("list")
@options.store
def list_plans(store: Path | None) -> None:
    """List the stored plans and any unreadable files.

    Counts the files in quarantine.
    """
    from steadytorch.plan.record import PlanRecord
    from steadytorch.report.plans import render_list

    opened = _open(store)
    render_list(
        options.console(False), list(opened.entries(PlanRecord)), opened.root, opened.quarantined()
    )


@plans.command("show")
@click.argument("plan_id", metavar="ID", shell_complete=completion.plan_ids)
@options.store
def show(plan_id: str, store: Path | None) -> None:
    """Show a plan, its evidence, and its key."""
    from steadytorch.report.plans import render_show

    plan = _plan(_open(store), plan_id)
    render_show(options.console(False), plan, Path(plan.path or ""))


@plans.command("rm")
@click.argument("plan_ids", metavar="[ID]...", nargs=-1, shell_complete=completion.plan_ids)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Remove all files: plans, quarantine, and engine choices.",
)
@click.option("--yes", is_flag=True, help="With --all: do not ask first.")
@options.store
def remove(plan_ids: Sequence[str], every: bool, yes: bool, store: Path | None) -> None:
    """Remove plans or unreadable files by ID."""
    from steadytorch.report.text import plain

    _one_of("an ID", bool(plan_ids), every)
    opened = _open(store)
    if every:
        files = list(_all_files(opened))
        if files and not yes and not _agreed(f"Remove {len(files)} files of {opened.root}?"):
            click.echo("removed no files")
            return
    else:
        paths = dict.fromkeys(opened.find(plan_id).path for plan_id in plan_ids)
        files = [(opened, path) for path in paths]
    problems = [problem for owner, path in files if (problem := owner.remove(path))]
    click.echo(f"{len(files) - len(problems)} removed from {plain(opened.root)}")
    if problems:
        raise UnsupportedError("\n".join(problems))


def _all_files(opened: Store) -> Iterator[tuple[Store, Path]]:
    from steadytorch.plan.engines import store_of_engines

    for owner in (opened, store_of_engines(opened)):
        if owner is not None:
            yield from ((owner, entry.path) for entry in owner.entries())
            yield from ((owner, path) for path in owner.quarantined())


@plans.command("export")
@click.argument(
    "path",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    callback=options.check_writable,
)
@click.argument("plan_ids", metavar="[ID]...", nargs=-1, shell_complete=completion.plan_ids)
@options.store
def export(path: Path, plan_ids: Sequence[str], store: Path | None) -> None:
    """Write plans to FILE for another machine.

    Writes all plans by default. FILE may be - for standard output.
    """
    from steadytorch.report.plans import render_exported
    from steadytorch.serve.exchange import export_plans

    with options.file_for("FILE", path) as target:
        exported = export_plans(target, plan_ids, store)
    render_exported(options.console(False), exported, path)


@plans.command("push")
@click.argument("url", metavar="URL")
@click.argument("plan_ids", metavar="[ID]...", nargs=-1, shell_complete=completion.plan_ids)
@options.store
def push(url: str, plan_ids: Sequence[str], store: Path | None) -> None:
    """Add plans to the second store at URL.

    Adds all plans by default. URL is anything that fsspec opens, as in STEADYTORCH_SECOND_STORE.
    A plan that is already there stays unchanged.
    """
    from steadytorch.report.plans import render_pushed
    from steadytorch.serve.exchange import push_plans

    pushed = push_plans(url, plan_ids, store)
    render_pushed(options.console(False), pushed)
    problems = [f"{each.path}: {each.problem}" for each in pushed if each.problem]
    if problems:
        raise UnsupportedError("not pushed: " + "; ".join(problems))


@plans.command("import")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@options.store
def import_(path: Path, store: Path | None) -> None:
    """Store the plans of an exported FILE.

    Says which of them fit this machine. A plan that does not fit is stored but not used. A plan
    that the store already has stays unchanged.
    """
    from steadytorch.report.plans import render_imported
    from steadytorch.serve.exchange import import_plans

    render_imported(options.console(False), import_plans(path, store))


@plans.command("verify")
@click.argument("plan_id", metavar="[ID]", required=False, shell_complete=completion.plan_ids)
@click.option("--all", "every", is_flag=True, help="Verify every plan of a bundled workload.")
@click.option(
    "--workload",
    metavar="WORKLOAD",
    shell_complete=completion.workloads,
    help="The workload that was tuned, with the same options; not needed for a bundled one.",
)
@options.shaping
@click.option(
    "--processes",
    type=click.IntRange(min=3),
    default=5,
    show_default=True,
    help="Fresh processes of each side.",
)
@options.store
@options.quiet
def verify(
    plan_id: str | None,
    every: bool,
    workload: str | None,
    batch: int | None,
    inputs: tuple[str, ...],
    device: str,
    train: bool,
    seed: int,
    processes: int,
    store: Path | None,
    quiet: bool,
) -> None:
    """Verify a plan's numerics and time it again.

    Times the plan against the untouched workload on this machine. Exits with 1 if its results
    differ, or if it is slower with 99 % confidence.
    """
    from steadytorch.tune.reverify import rebuilt, reverify

    _one_of("an ID", plan_id is not None, every)
    if every and workload is not None:
        raise UsageError("--all and --workload exclude each other: name a plan by its ID")
    if workload is None and (batch is not None or inputs or train):
        raise UsageError("--batch, --input and --train shape --workload: name it as well")
    console, opened = options.console(quiet), _open(store)

    def run(plan: Plan) -> Reverified:
        loaded = (
            rebuilt(plan)
            if workload is None
            else options.load(workload, batch=batch, inputs=inputs, train=train, seed=seed)
        )
        return reverify(
            plan,
            loaded,
            device=None if device == "auto" else device,
            processes=processes,
            seed=seed,
            progress=options.teller(console),
        )

    results = _run_all(console, opened, run) if every else [run(_plan(opened, plan_id or ""))]
    _leave(console, results)


def _run_all(
    console: Console, opened: Store, run: Callable[[Plan], Reverified]
) -> Iterator[Reverified]:
    """Verifies all stored plans and yields the results; reports plans that cannot run here."""
    from steadytorch.report.plans import render_passed_over
    from steadytorch.serve.plan import Plan

    done = 0
    for plan in [entry.payload for entry in opened.entries(Plan) if entry.key]:
        try:
            result = run(plan)
        except SteadyError as error:
            render_passed_over(console, plan, str(error))
            continue
        done += 1
        yield result
    if not done:
        raise UnsupportedError(f"no plan in {opened.root} can be verified here")


def _leave(console: Console, results: Iterable[Reverified]) -> None:
    """Prints verification results as they arrive, and exits with 1 if any plan failed."""
    from steadytorch.report.plans import render_reverified
    from steadytorch.report.text import plain

    failed = False
    for result in results:
        render_reverified(console, result)
        if result.failed is not None:
            failed = True
            reason = plain(result.failed)
            click.echo(f"steady: plan {result.plan.id} failed: {reason}", err=True)
    if failed:
        sys.exit(1)


def _open(store: Path | None) -> Store:
    """Opens the local plan store without `STEADYTORCH_SECOND_STORE`."""
    from steadytorch.plan.store import Store

    return Store(store, second="")


def _plan(opened: Store, plan_id: str) -> Plan:
    from msgspec.structs import replace

    from steadytorch.serve.plan import Plan

    found = opened.find(plan_id, Plan)
    if found.problem is not None:
        raise PlanError(f"plan file {found.path} {found.problem}: remove it, and tune again")
    return replace(found.payload, path=str(found.path))


def _one_of(what: str, given: bool, every: bool) -> None:
    if given == every:
        raise UsageError(f"give either {what} or --all")


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("--all asks first, but standard input is not a terminal: add --yes")
    return click.confirm(question)
