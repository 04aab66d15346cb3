"""Runs a script or module under a watch: `python -m steadytorch.watching.script`.

`steady run` replaces its own process by one that runs this module. The script runs as `__main__`
in a process with few other imports, and keeps its own exit code, streams and signals.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from steadytorch.watching.watch import Watch

if TYPE_CHECKING:
    from steadytorch.results.watched import Watched

REQUEST = "STEADYTORCH_RUN"
"""Environment variable with the request; removed before the script starts."""


def command(request: dict[str, Any], arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run a script under a watch.

    Args:
        request: `script` or `module`; `json`, `html`, `quiet`, `keep_slow` and `traces`.
        arguments: command-line arguments of the script.
    """
    import subprocess

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    environment = {**os.environ, REQUEST: json.dumps(request)}
    return [sys.executable, *flags, "-m", __name__, *arguments], environment


def main() -> None:
    """Runs the requested script or module under a watch, then writes the report."""
    request = json.loads(os.environ.pop(REQUEST))
    space = ModuleType("__main__")
    space.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = space
    seen: Watch[Any] = Watch(keep_slow=request["keep_slow"], traces=request["traces"])
    error: BaseException | None = None
    seen.start()
    owner = os.getpid()
    try:
        if request["module"] is not None:
            _run_module(request["module"])
        else:
            _run_file(request["script"], space)
    except BaseException as raised:
        error = raised
        if not isinstance(raised, SystemExit):
            _show(raised)
        raise
    finally:
        if os.getpid() == owner:  # forked children of the script end here too
            _finish(seen, error, request)


def _run_file(path: str, space: ModuleType) -> None:
    """Runs a file as `python FILE` does."""
    from importlib.machinery import SourceFileLoader

    whole = os.path.abspath(path)
    with open(whole, "rb") as file:
        code = compile(file.read(), whole, "exec", dont_inherit=True)
    sys.argv[0] = path
    sys.path[0] = os.path.dirname(os.path.realpath(whole))
    loader = SourceFileLoader("__main__", whole)
    space.__dict__.update(__file__=whole, __spec__=None, __cached__=None, __loader__=loader)
    exec(code, space.__dict__)


def _run_module(name: str) -> None:
    """Runs a module as `python -m NAME` does."""
    import runpy

    sys.path[0] = os.getcwd()
    sys.argv[0] = "-m"
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _show(error: BaseException) -> None:
    """Prints the traceback without steadytorch's frames, and stops Python from repeating it."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    hook = sys.excepthook
    sys.excepthook = lambda *_: None
    sys.stdout.flush()
    error.__traceback__ = frames
    hook(type(error), error, error.__traceback__)


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen runpy")


def _finish(seen: Watch[Any], error: BaseException | None, request: dict[str, Any]) -> None:
    """Writes the report; a failure prints one line and leaves the script's exit code unchanged."""
    try:
        seen.stop(error)
        _write(seen.result, request)
    except KeyboardInterrupt:
        print("steady: the report was interrupted", file=sys.__stderr__)
    except Exception as failure:
        from steadytorch.errors import one_line

        print(f"steady: the report failed: {one_line(failure)}", file=sys.__stderr__)


def _write(result: Watched, request: dict[str, Any]) -> None:
    """Prints the summary on standard error, and writes the requested JSON and HTML files.

    Only rank 0 prints the summary; other ranks add their rank to the names of their files.

    Args:
        result: the watched steps.
        request: see `command`.
    """
    rank = os.environ.get("RANK", "0")
    from rich.console import Console

    from steadytorch.report.run import WIDTH, render_run
    from steadytorch.report.text import printable_anywhere
    from steadytorch.results.saved import to_json

    name = request["script"] or f"-m {request['module']}"
    content = to_json(result, name, result.environment)
    if request["json"] is not None:
        _ranked(request["json"], rank).write_bytes(content)
    if request["html"] is not None:
        from steadytorch.report.files import share_plotly, stands_alone
        from steadytorch.report.html import page

        target = _ranked(request["html"], rank)
        made = page(target, content, embed=stands_alone(target))
        target.write_text(made, "utf-8")
        share_plotly(made, target)
    if not request["quiet"] and rank == "0" and sys.__stderr__ is not None:
        sys.__stderr__.flush()
        with printable_anywhere():
            render_run(Console(file=sys.__stderr__, width=WIDTH, highlight=False), name, result)


def _ranked(path: str, rank: str) -> Path:
    whole = Path(path)
    return whole if rank == "0" else whole.with_suffix(f".rank{rank}{whole.suffix}")


if __name__ == "__main__":
    main()
