"""`steady run`: run an unmodified script and show where its time and variability went."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import click

from steadytorch.cli import options
from steadytorch.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m MODULE` does.")
@options.json_file
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=options.check_writable,
    help="Write the result as an offline HTML page, with Plotly beside it.",
)
@click.option(
    "--keep-slow",
    type=click.IntRange(min=1, max=1000),
    metavar="N",
    help="Keep the traces of the N slowest steps that stand out.",
)
@click.option(
    "--traces",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for these traces.  [default: steady-traces]",
)
@options.quiet
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [ARGS]...")
def run(
    module: str | None,
    json_path: Path | None,
    html_path: Path | None,
    keep_slow: int | None,
    traces: Path | None,
    quiet: bool,
    script: tuple[str, ...],
) -> None:
    """Run SCRIPT unchanged; at its end say where its time went.

    The script keeps its exit code, streams, signals and random numbers. The summary goes to
    standard error. Under torchrun: torchrun --no-python steady run SCRIPT.
    """
    for option, path in (("--json", json_path), ("--html", html_path)):
        if path == options.STANDARD_OUTPUT:
            raise UsageError(f"{option} -: standard output belongs to the script; name a file")
    if traces is not None and keep_slow is None:
        raise UsageError("--traces needs --keep-slow N: the number of slow steps to keep")
    from steadytorch.watching.watch import TRACES, check_folder

    folder = (traces or Path(TRACES)).absolute()
    if keep_slow is not None:
        check_folder(folder)
    request = {
        "module": module,
        "script": None,
        "json": json_path and str(json_path.absolute()),
        "html": html_path and str(html_path.absolute()),
        "quiet": quiet,
        "keep_slow": keep_slow or 0,
        "traces": str(folder),
    }
    arguments = list(script)
    if module is None:
        if not arguments:
            raise UsageError("nothing to run: give a script, or a module with -m")
        request["script"] = _existing(arguments.pop(0), click.get_current_context())
    elif find_spec(module.partition(".")[0]) is None and not _here(module):
        raise UsageError(f"there is no module {module!r}: check its name and the folder")
    from steadytorch.watching.script import command

    line, environment = command(request, arguments)
    sys.stdout.flush()
    os.execve(line[0], line, environment)


def _existing(path: str, ctx: click.Context) -> str:
    found = Path(path)
    if found.is_dir():
        raise UsageError(f"{path} is a folder: give a script, or a module with -m")
    if not found.is_file():
        if path.startswith("-"):
            name = path.partition("=")[0]
            known = [each for option in ctx.command.get_params(ctx) for each in option.opts]
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see steady run --help"
            raise UsageError(f"no such option {name}; {hint}")
        raise UsageError(f"there is no script {path}")
    if not os.access(found, os.R_OK):
        raise UsageError(f"{path} cannot be read: no permission")
    return path


def _here(module: str) -> bool:
    name = module.partition(".")[0]
    return Path(name).is_dir() or Path(f"{name}.py").is_file()
