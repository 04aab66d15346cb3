"""The Python interpreter that runs a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Interpreter(NamedTuple):
    """The Python interpreter of a worker, with import path and working directory.

    Attributes:
        python: path of the Python executable.
        paths: folders put before its own packages, first to last.
        folder: working directory; None for the parent's.
    """

    python: str
    paths: tuple[str, ...]
    folder: Path | None = None

    @classmethod
    def own(cls) -> Interpreter:
        """This process's interpreter and import path."""
        return cls(sys.executable, tuple(os.path.abspath(entry) for entry in sys.path))

    def start(
        self,
        module: str,
        descriptor: int,
        arguments: Sequence[str],
        log: BinaryIO,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts `python -m MODULE DESCRIPTOR ARGUMENTS` in its own session.

        Args:
            module: the module to run.
            descriptor: file descriptor that it inherits.
            arguments: further arguments.
            log: takes its output.
            environment: extra environment variables.
        """
        return subprocess.Popen(
            [self.python, "-P", "-m", module, str(descriptor), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            pass_fds=[descriptor],
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(self.paths)},
            start_new_session=True,  # Ctrl-C only reaches the parent, which ends the group
        )
