"""A busy process beside a timed one, for plans that hold up on shared cores."""

from __future__ import annotations

import subprocess
import sys

# It is idle until a byte arrives, then busy until the next; it ends with the pipe, and so with us.
_PROGRAM = """
import os, select
while os.read(0, 1):
    while not select.select([0], [], [], 0)[0]:
        sum(range(1_000))
    if not os.read(0, 1):
        break
"""


class Neighbour:
    """Keeps one core busy within its context; it may be entered again and again.

    The process starts at the first entry and ends with `close`.

    Args:
        wanted: False for a context that does nothing.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        if self._wanted and self._process is None:
            command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self._switch()

    def __exit__(self, *error: object) -> None:
        self._switch()

    def _switch(self) -> None:
        """Makes it busy or idle.

        Raises:
            BrokenPipeError: the process has died.
        """
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.write(b".")

    def close(self) -> None:
        """Ends the process; entering afterwards starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
