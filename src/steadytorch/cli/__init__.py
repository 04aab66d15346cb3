"""Command line `steady`: one module per command, imported on first use."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

import click

from steadytorch import __version__
from steadytorch.errors import SteadyError
from steadytorch.report.text import plain, printable_anywhere

INTERRUPTED = 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOADERS, _AGAIN_S = "<frozen importlib._bootstrap_external>", 0.02
"""Where extension modules are loaded, and seconds until a signal that came then comes again."""

COMMANDS = {
    "demo": "explain and tune a bundled ResNet-50; downloads nothing",
    "measure": "measure how fast and how steady a workload runs",
    "run": "run a script unchanged; say where its time goes",
    "explain": "find where time and variability go, and the fix",
    "compare": "compare two workloads or saved results; CI gates",
    "gate": "compare the working tree with a revision, for CI",
    "track": "find changes in a series of results over commits",
    "tune": "find, verify and store the fastest plan for a workload",
    "conv": "choose the cuDNN engine of each convolution",
    "plans": "list, show, verify, exchange and remove stored plans",
    "report": "turn a saved result into one offline HTML page",
    "doctor": "check this machine: versions, device, noise, limits",
}
"""Each command with its line of help, in the order in which a new user needs them."""


class LazyGroup(click.Group):
    """A click group that lists its commands without importing them, so that `--help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands, in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"steadytorch.cli.{cmd_name}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table of commands and their descriptions."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="Exit codes: 0 done; 1 a gate or a verification failed; 2 bad usage or "
    "input; 3 this machine cannot do it; 130 interrupted, partial results kept; 143 terminated; "
    "129 hung up.",
)
@click.version_option(__version__, prog_name="steady")
def steady() -> None:
    """Benchmark mode for a whole PyTorch workload.

    Tries every execution option that applies, verifies the numbers, and keeps the fastest steady
    plan for each input shape.
    """


def _show(error: click.ClickException) -> None:
    message = error.format_message()
    if "\n" in message:  # the whole help, where a command is missing
        click.echo(message, err=True)
        return
    command = getattr(error, "ctx", None)
    hint = f"; see {command.command_path} --help" if command else ""
    click.echo(f"steady: {message.rstrip('.')}{hint}", err=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code.

    Usage errors and `SteadyError` print one line instead of a traceback.
    """
    with ended_once(), printable_anywhere():
        _main(arguments)


class _Terminated(BaseException):
    """Raised on SIGTERM or SIGHUP.

    `_Terminated` is not a SystemExit, because a workload may raise SystemExit.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_once() -> Iterator[None]:
    """Lets the first Ctrl-C, SIGTERM or SIGHUP end the command, and ignores later ones.

    A signal is deferred while an extension module is initialised, because Cython discards
    exceptions raised during initialisation. Signals that are already ignored on entry stay ignored,
    as `nohup` requires.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        if _initialises_extension(frame):
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        _drop_terminal()
        raise _Terminated(number)

    heeded = [each for each in _ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    found = {each: signal.signal(each, end) for each in heeded}
    try:
        yield
    finally:
        for each, before in found.items():
            if signal.getsignal(each) is end:
                signal.signal(each, signal.SIG_DFL if before is None else before)


def _initialises_extension(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _LOADERS and code.co_qualname.startswith("ExtensionFileLoader."):
            return True
        frame = frame.f_back
    return False


def _drop_terminal() -> None:
    """Redirects output to /dev/null if its terminal is gone, because writing would raise."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _main(arguments: list[str] | None) -> None:
    try:
        code = steady.main(arguments, prog_name="steady", standalone_mode=False)
    except click.ClickException as error:
        _show(error)
        sys.exit(2)
    except SteadyError as error:
        # The message may quote files and foreign exceptions.
        lines = "\n".join(plain(line) for line in str(error).split("\n"))
        click.echo(f"steady: {lines}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = error.filename or "the output"
        click.echo(f"steady: {plain(what)} cannot be written: {error.strerror}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("steady: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except _Terminated as by:
        said = "hung up" if by.number == signal.SIGHUP else "terminated"
        click.echo(f"steady: {said}", err=True)
        sys.exit(128 + by.number)
    sys.exit(code if isinstance(code, int) else 0)
