"""Sets up the Python interpreter and import path that run each revision's code."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from steadytorch.errors import UsageError
from steadytorch.process.interpreter import Interpreter
from steadytorch.revisions.repository import error_line

_PACKAGES = {"site-packages", "dist-packages"}
_LAYER = "_steadytorch_layer.pth"


def shared_environment(root: Path, tree: Path, folder: Path) -> Interpreter:
    """This process's interpreter, with a revision's tree first on the import path.

    Import path entries inside the working tree are redirected into `tree`, so that the revision
    never imports working-tree code. Entries for installed packages stay unchanged.

    Args:
        root: the working tree.
        tree: the revision's tree; `root` for the working tree itself.
        folder: the working directory, within `tree`.
    """
    paths = [*_code_of(tree), *(_moved(entry, root, tree) for entry in Interpreter.own().paths)]
    return Interpreter(sys.executable, tuple(dict.fromkeys(paths)), folder)


def given_environment(python: str, tree: Path, folder: Path, scratch: Path) -> Interpreter:
    """An interpreter that the user chose, with a revision's tree first on its import path.

    Args:
        python: path of the Python executable.
        tree: the revision's tree.
        folder: the working directory, within `tree`.
        scratch: an empty folder, which receives a link to this package.

    Raises:
        UsageError: it is not an executable file.
    """
    path = os.path.abspath(python)
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        raise UsageError(
            f"{python} is not a Python executable: pass a path such as venv/bin/python"
        )
    return Interpreter(path, (*_code_of(tree), str(_linked(scratch))), folder)


def installed_environment(tree: Path, folder: Path, scratch: Path, what: str) -> Interpreter:
    """A fresh virtual environment with a revision installed by pip.

    Packages that the revision does not require, or requires at the version installed here, come
    from this process's environment.

    Args:
        tree: the revision's tree, with a pyproject.toml or setup.py.
        folder: the working directory, within `tree`.
        scratch: an empty folder for the environment.
        what: name of the revision, for messages.

    Raises:
        UsageError: the revision does not install.
    """
    venv = scratch / "venv"
    _run([sys.executable, "-m", "venv", str(venv)], what, "no virtual environment can be made")
    own = sysconfig.get_path("purelib", "venv", vars={"base": str(venv), "platbase": str(venv)})
    layers = [entry for entry in sys.path if _PACKAGES & set(Path(entry).parts)]
    (Path(own) / _LAYER).write_text("".join(f"{layer}\n" for layer in layers))
    python = str(venv / "bin" / "python")
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
    _run([python, *pip, str(tree)], what, "does not install")
    return Interpreter(python, (str(_linked(scratch)),), folder)


def _code_of(tree: Path) -> list[str]:
    """The import path entries of a revision's tree: `src`, if present, and the root."""
    return [str(each) for each in (tree / "src", tree) if each.is_dir()]


def _moved(entry: str, root: Path, tree: Path) -> str:
    path = Path(entry).resolve()
    if not path.is_relative_to(root):
        return entry
    inside = path.relative_to(root)
    return entry if _PACKAGES & set(inside.parts) else str(tree / inside)


def _linked(scratch: Path) -> Path:
    """A folder that links to this package alone, so that the same code times both revisions."""
    only = scratch / "measuring"
    only.mkdir()
    (only / "steadytorch").symlink_to(Path(__file__).resolve().parents[1])
    return only


def _cause(output: str) -> str:
    """The line of pip's output that explains a failure; the last build line if a build failed."""
    built = output.partition("[end of output]")
    lines = [line.strip() for line in built[0].splitlines() if line.strip()]
    return lines[-1][:300] if built[1] and lines else error_line(output)


def _run(command: list[str], what: str, fails: str) -> None:
    # PYTHONPATH would put the working tree in front of what pip installs.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        why = _cause(done.stderr or done.stdout)
        raise UsageError(f"{what} {fails}: {why or f'exit status {done.returncode}'}")
