"""A process that keeps one core busy during timing, for tuning on shared cores."""

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
    """Context manager that keeps one core busy; can be entered repeatedly.

    The busy process starts at the first entry and ends with `close`.

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
        """Toggles the process between busy and idle.

        Raises:
            BrokenPipeError: the process has died.
        """
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.write(b".")

    def close(self) -> None:
        """Ends the busy process; the next entry starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
