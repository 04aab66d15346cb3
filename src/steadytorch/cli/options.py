"""Options that several commands share, and helpers to load workloads and write files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from steadytorch.cli import completion
from steadytorch.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from steadytorch.device.facts import DeviceFacts
    from steadytorch.results.candidate import Candidate
    from steadytorch.workload.workload import Workload

Command = Callable[..., Any]


STANDARD_OUTPUT = Path("-")
_KEPT = "steadytorch.standard_output"


def check_writable(
    ctx: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Raises a usage error if an output file is not writable, before minutes of work.

    If `path` is `-`, standard output is reserved for the document, and all other output goes to
    standard error.
    """
    if path is None or ctx.resilient_parsing:
        return path
    if path == STANDARD_OUTPUT:
        _keep_standard_output(ctx, parameter.opts[0])
        return path
    if not path.parent.is_dir():
        raise UsageError(
            f"{parameter.opts[0]} {path} cannot be written: there is no folder {path.parent}"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{parameter.opts[0]} {path} cannot be written: no permission")
    return path


def _keep_standard_output(ctx: click.Context, option: str) -> None:
    if _KEPT in ctx.meta:
        raise UsageError(f"{option} -: another option writes to standard output; name a file")
    try:
        kept = os.dup(1)
    except OSError as error:
        raise UsageError(f"{option} - cannot be written: standard output is closed") from error
    ctx.meta[_KEPT] = kept
    # Of the root, as click does not close the context of a command whose other options are wrong.
    ctx.find_root().with_resource(_all_on_standard_error(kept))


@contextlib.contextmanager
def _all_on_standard_error(kept: int) -> Iterator[None]:
    """Redirects `sys.stdout` and descriptor 1 (used directly by libraries) to standard error."""
    if sys.stdout is not None:
        sys.stdout.flush()
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def fraction(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Parses a percentage such as `2%` as a fraction; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text)
    if found is None or not float(found[1]) < 100:
        raise UsageError(f"{parameter.opts[0]} {text!r} is not a percentage such as 2%")
    return float(found[1]) / 100


device = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda[:i]",
    help="Device to run on.",
)
json_file = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, readable=False, allow_dash=True, path_type=Path),
    callback=check_writable,
    help="Write the result as one JSON object; - for standard output.",
)
markdown_file = click.option(
    "--markdown",
    "markdown_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    callback=check_writable,
    help="Write Markdown for a pull request or a CI page; - for standard output.",
)
metric = click.option(
    "--metric",
    type=click.Choice(["latency", "period"]),
    default="latency",
    show_default=True,
    help="latency: call to finished result; period: time per call with the queue filled.",
)


def budget(what: str, default: str | None = None) -> Callable[[Command], Command]:
    """Makes the option `--budget`.

    Args:
        what: what the time is for; begins the help.
        default: the default; None for no limit.
    """
    unlimited = "" if default is not None else "  [default: no limit]"
    return click.option(
        "--budget",
        default=default,
        show_default=default is not None,
        metavar="TIME",
        help=f"{what}, such as 90s or 5m.{unlimited}",
    )


quiet = click.option("--quiet", is_flag=True, help="Print errors only.")
store = click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the plan store.  [default: ~/.cache/steadytorch/plans]",
)


def repeated(store: Path | None) -> str:
    """Returns the option `--store` for a suggested command; empty for the default store."""
    import shlex

    from steadytorch.report.text import plain

    return "" if store is None else f" --store {shlex.quote(plain(store))}"


def shaping(command: Command) -> Command:
    """Adds the options that shape a workload, such as `--batch` and `--input`."""
    for decorate in (
        click.option("--seed", default=0, show_default=True, help="Seed of weights and inputs."),
        click.option("--train", is_flag=True, help="Run a training step instead of inference."),
        device,
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="SHAPE[:DTYPE]",
            help="An input, such as 64x3x224x224:float32; repeat for several.",
        ),
        click.option("--batch", type=click.IntRange(min=1), help="Batch size."),
    ):
        command = decorate(command)
    return command


def workload(command: Command) -> Command:
    """Adds the argument WORKLOAD, and the options that shape the workload."""
    argument = click.argument("workload", metavar="WORKLOAD", shell_complete=completion.workloads)
    return argument(shaping(command))


def refuse_without(ctx: click.Context, needed: str, names: Sequence[str]) -> None:
    """Raises a usage error if one of the parameters `names`, which need `needed`, was given."""
    for each in ctx.command.params:
        if (
            each.name in names
            and ctx.get_parameter_source(each.name) == ParameterSource.COMMANDLINE
        ):
            raise UsageError(f"{each.opts[0]} needs {needed}")


def load(
    spec: str, *, batch: int | None, inputs: tuple[str, ...], train: bool, seed: int
) -> Workload:
    """Loads a workload on the CPU; worker processes move their copies to the device."""
    from steadytorch.workload.loading import load_workload

    return load_workload(spec, batch=batch, inputs=inputs, device="cpu", train=train, seed=seed)


def load_with_transforms(
    name: str, facts: DeviceFacts, *, quiet: bool = False, **shape: Any
) -> tuple[Workload, Candidate]:
    """Loads the workload and parses the transforms of `WORKLOAD@TRANSFORM+TRANSFORM`.

    Prints a note for each transform that a search would skip on this device.

    Args:
        name: the workload and its transforms, as the user typed them.
        facts: facts about the device to run on.
        quiet: whether to omit the notes.
        shape: keyword arguments of `load`.

    Raises:
        UsageError: a transform or its setting is unknown, or the transforms cannot be combined.
        UnsupportedError: a transform is for another device.
    """
    from steadytorch import transforms
    from steadytorch.transforms.base import NotApplicable
    from steadytorch.transforms.traits import no_cuda

    spec, at, settings = name.rpartition("@")
    # In user@host/model.py:factory the @ is part of a path.
    if not at or set(settings) & set("/:"):
        return load(name, **shape), ()
    candidate = transforms.parse(settings, facts)
    loaded = load(spec, **shape)
    for each in candidate:
        answer = transforms.create(each).applies_to(loaded, facts)
        if not isinstance(answer, NotApplicable):
            continue
        if (True, answer.reason) == no_cuda(facts):
            raise UnsupportedError(f"{each} cannot be applied here: {answer.reason}")
        if not quiet:
            text = f"steady: note: a search would leave out {each} here: {answer.reason}"
            click.echo(text, err=True)
    return loaded, candidate


def teller(console: Console) -> Callable[[str], None]:
    """Returns a function that prints progress messages."""

    def tell(message: str) -> None:
        console.print(message, style="dim", markup=False, emoji=False)

    return tell


def silent(message: str) -> None:
    """Discards a progress message; used in place of the function that `teller` returns."""


def console(quiet: bool) -> Console:
    """Makes a command's Rich console. Without a terminal, output is plain and 80 columns wide."""
    from rich.console import Console

    class Patient(Console):
        """A console that survives a closed pipe, so that output files are still written."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    made = Patient(quiet=quiet, highlight=False)
    if not made.is_terminal:
        made = Patient(quiet=quiet, highlight=False, width=80)
    return made


def write_json(path: Path | None, document: bytes) -> None:
    """Writes the JSON document to the file given by `--json`; does nothing if `path` is None.

    Raises:
        UsageError: the file cannot be written.
    """
    write("--json", path, document)


def write(option: str, path: Path | None, content: bytes) -> None:
    """Writes `content` to the file given by an option; does nothing if `path` is None.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return
    try:
        if path == STANDARD_OUTPUT:
            _write_kept(content)
        else:
            path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from error


def _write_kept(content: bytes) -> None:
    with (
        contextlib.suppress(BrokenPipeError),  # the reader has closed the pipe
        os.fdopen(os.dup(click.get_current_context().meta[_KEPT]), "wb") as output,
    ):
        output.write(content)


@contextlib.contextmanager
def file_for(option: str, path: Path) -> Iterator[Path]:
    """Yields the file to write; for `-`, a temporary file that is copied to standard output."""
    if path != STANDARD_OUTPUT:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="steadytorch-") as folder:
        made = Path(folder) / "output"
        yield made
        write(option, path, made.read_bytes())
