"""`steady tune --list`: tune the workloads of a list, shared by any number of processes."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from steadytorch import __version__
from steadytorch.cli import INTERRUPTED, options
from steadytorch.errors import UnsupportedError, UsageError, one_line

if TYPE_CHECKING:
    from steadytorch.process.worker import Worker
    from steadytorch.results.sweep import Sweep, SweepRow
    from steadytorch.sweeps.worker import Item, SweepFolder

OF_A_LINE = (
    *("workload", "batch", "inputs", "device", "train", "seed"),
    *("objective", "precision", "tolerance", "budget", "max_memory", "bundle"),
)
"""Parameters of `steady tune` that a line may have. Given beside `--list`, they are defaults."""
HANDLER = "steadytorch.tune.sweep_worker:SweepHandler"
"""Import path of the worker handler that tunes a workload."""
_NOT_IN_RESULT = ("budget", "bundle", "device")
"""Parameters that do not change a line's identity, except a device given in the line itself."""
_MOST_BYTES = 16 << 20
_SHAPE = ("batch", "inputs", "train", "seed")
_GRACE_S = 1200.0
"""Seconds beyond twice the budget after which a workload counts as hung."""
_START_S = 600.0
"""Seconds after which a process that imports PyTorch counts as hung."""


def read_items(path: Path, ctx: click.Context) -> list[Item]:
    """Reads a list file: one WORKLOAD with options per line; `#` starts a comment.

    Args:
        path: the list.
        ctx: context of `steady tune`, whose options are the defaults.

    Returns:
        The items in order. Lines that mean the same workload make one item.

    Raises:
        UsageError: the list is unreadable or empty, or lines are wrong; all are named.
    """
    from steadytorch.sweeps.worker import Item

    command = _line_command(ctx.command)
    given = {
        name: ctx.params[name]
        for name in OF_A_LINE
        if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
    }
    items: dict[str, Item] = {}
    wrong: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            parsed = _parsed(command, words, given)
        except (ValueError, click.ClickException, UsageError) as error:
            reason = error.format_message() if isinstance(error, click.ClickException) else error
            wrong.append(f"  line {number}: {str(reason).rstrip('.')}")
            continue
        item = Item(_identity(parsed), shlex.join(words), parsed.params)
        items.setdefault(item.id, item)
    if wrong:
        raise UsageError("\n".join([f"{path} has lines that cannot be read:", *wrong]))
    if not items:
        raise UsageError(f"{path} is empty: write one WORKLOAD with its options per line")
    return list(items.values())


def _lines(path: Path) -> list[str]:
    try:
        if not path.is_file():
            raise UsageError(f"list {path} is not a file: pass a text file of workloads")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(f"list {path} exceeds {_MOST_BYTES >> 20} MiB: split it")
        return content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"list {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"list {path} is not UTF-8 text: {error}") from error


def _line_command(tune: click.Command) -> click.Command:
    params = [each for each in tune.params if each.name in OF_A_LINE]
    return click.Command("line", params=params, add_help_option=False)


def _parsed(command: click.Command, words: list[str], given: Mapping[str, Any]) -> click.Context:
    from steadytorch.quantities import parse_bytes, parse_duration

    try:
        parsed = command.make_context("line", list(words), default_map=dict(given))
    except click.NoSuchOption as error:
        raise UsageError(f"{error.option_name} is not an option of a line") from None
    if not parsed.params["workload"]:
        raise UsageError("it has no WORKLOAD")
    parse_duration(parsed.params["budget"])
    if parsed.params["max_memory"] is not None:
        parse_bytes(parsed.params["max_memory"])
    return parsed


def _identity(parsed: click.Context) -> str:
    """Digest of everything that determines the result of a line, except the machine."""
    params = parsed.params
    made_of: dict[str, Any] = {k: v for k, v in params.items() if k not in _NOT_IN_RESULT}
    if parsed.get_parameter_source("device") == ParameterSource.COMMANDLINE:
        made_of["device"] = params["device"]
    path = params["workload"].rpartition(":")[0]
    if path.endswith(".py"):
        with suppress(OSError, ValueError):
            made_of["source"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    with suppress(PackageNotFoundError):
        made_of["torch"] = version("torch")
    made_of["steadytorch"] = __version__
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]


def sweep(ctx: click.Context) -> None:
    """Tunes the workloads of a list until each has a result, prints the table, and exits.

    With `--status`, only prints the table; with `--submit`, starts jobs that tune the workloads.

    Args:
        ctx: context of `steady tune`.

    Raises:
        UsageError: the list, an option or the folder is wrong.
        UnsupportedError: this machine cannot tune or store anything, or submitit is missing.
    """
    from steadytorch.report.text import plain
    from steadytorch.sweeps.shard import parse_shard
    from steadytorch.sweeps.worker import SweepFolder, lease_timeout_s

    asked = ctx.params
    path: Path = asked["list_path"]
    _check_options(ctx)
    order = parse_shard(asked["shard"], os.environ)
    items = read_items(path, ctx)
    shared = SweepFolder(_folder_of(path, asked["folder"]), items, lease_timeout_s())
    if asked["status"]:
        found = _show(ctx, shared)
        sys.exit(0 if found.count("done") == len(found.rows) else 1)
    shared.check()
    if asked["retry"]:
        shared.forget_failures()
    if asked["submit"] is not None:
        from steadytorch.cli.submit import submit

        submit(ctx, shared)
        return
    try:
        _work(ctx, shared, order.order(items))
    except KeyboardInterrupt:
        _show(ctx, shared)
        folder = plain(shared.path)
        click.echo(f"steady: interrupted; results so far are in {folder}", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(1 if _show(ctx, shared).count("failed") else 0)


def _check_options(ctx: click.Context) -> None:
    asked = ctx.params
    if asked["workload"] is not None:
        raise UsageError(f"{asked['workload']} and --list exclude each other: add it to the list")
    if asked["everything"]:
        raise UsageError("--all and --list exclude each other: see steady plans show")
    if asked["submit"] is None:
        options.refuse_without(ctx, "--submit", ("partition", "slurm"))
    elif asked["status"] or asked["json_path"] is not None:
        raise UsageError("--submit prints no table: run --status afterwards, without --submit")


def _folder_of(path: Path, folder: Path | None) -> Path:
    """Returns the sweep's shared folder: `folder`, or by default the list's path plus `.sweep`."""
    return (path.with_name(f"{path.name}.sweep") if folder is None else folder).resolve()


def _show(ctx: click.Context, shared: SweepFolder) -> Sweep:
    from steadytorch.device.facts import load_facts
    from steadytorch.report.sweep import render_sweep
    from steadytorch.results.saved import to_json
    from steadytorch.results.sweep import Sweep

    path = str(ctx.params["list_path"])
    found = Sweep(list=path, folder=str(shared.path), rows=shared.rows())
    render_sweep(options.console(ctx.params["quiet"]), found)
    if ctx.params["json_path"] is not None:
        environment = load_facts("cpu")
        options.write_json(ctx.params["json_path"], to_json(found, path, environment))
    return found


def _work(ctx: click.Context, shared: SweepFolder, order: list[Item]) -> None:
    from steadytorch.quantities import counted
    from steadytorch.report.sweep import format_row
    from steadytorch.report.text import plain

    console = options.console(ctx.params["quiet"])

    def tell(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    def waiting(count: int) -> None:
        tell(f"waiting for {counted(count, 'workload')} of other workers")

    tell(f"{counted(len(order), 'workload')}, shared in {plain(shared.path)}")
    tuned = runner(ctx.params["store"], ctx.params["mode"], ctx.params["device"], shared.worker)

    def run(item: Item) -> SweepRow:
        tell(f"tuning {plain(item.text)}")
        return tuned(item)

    shared.work(order, run, lambda row: tell(format_row(row)), waiting)


def runner(store: Path | None, mode: str, device: str, worker: str) -> Callable[[Item], SweepRow]:
    """Returns a function that tunes one item of a list in a fresh process.

    If a workload fails, the function returns a row with status `failed`. If this machine cannot
    tune or store anything, the function raises `UnsupportedError` instead of failing every item.

    Args:
        store: folder of the plan store; None for the default one.
        mode: `replay`, `tune` or `strict`.
        device: the device of lines that name none.
        worker: the name of this worker, for the row.
    """
    import msgspec

    from steadytorch.process.folder import shared_folder
    from steadytorch.process.worker import Worker, WorkerFault
    from steadytorch.results.sweep import SweepRow

    def run(item: Item) -> SweepRow:
        began = time.monotonic()
        row: dict[str, Any] = {"workload": item.text, "worker": worker}
        with ExitStack() as at_the_end:
            try:
                scratch = at_the_end.enter_context(shared_folder())
                process = Worker(HANDLER, scratch, "tune", {"TMPDIR": str(scratch)})
            except OSError as error:
                raise UnsupportedError(f"no process can start here: {one_line(error)}") from error
            at_the_end.callback(process.kill)
            try:
                _check_machine(process, item, device)
                found = _tuned(process, item, store, mode)
            except WorkerFault as fault:
                found = {"status": "failed", "reason": fault.reason}
        row |= found | {"seconds": time.monotonic() - began}
        return msgspec.convert(row, SweepRow)

    return run


def _check_machine(process: Worker, item: Item, device: str) -> None:
    from steadytorch.process.worker import WorkerFault

    try:
        process.call("check", _START_S, device=item.options["device"])
    except WorkerFault as fault:
        if item.options["device"] != device:
            raise  # the line is wrong, or for another machine
        raise UnsupportedError(f"this machine cannot tune: {fault.reason}") from fault


def _tuned(process: Worker, item: Item, store: Path | None, mode: str) -> dict[str, Any]:
    from steadytorch.quantities import parse_bytes, parse_duration

    given = item.options
    budget_s, most = parse_duration(given["budget"]), given["max_memory"]
    names = ("objective", "precision", "tolerance", "seed")
    asked = {name: given[name] for name in names} | {
        "budget_s": budget_s,
        "max_memory_bytes": None if most is None else parse_bytes(most),
    }
    found = process.call(
        "tune",
        2 * budget_s + _GRACE_S,
        workload=given["workload"],
        shape={name: given[name] for name in _SHAPE},
        options=asked,
        device=given["device"],
        store=None if store is None else str(store),
        mode=mode,
        bundle=given["bundle"],
    )
    if reason := found.get("unable"):
        raise UnsupportedError(reason)
    return {"status": "done", **found}
