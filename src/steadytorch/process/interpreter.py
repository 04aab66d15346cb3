"""The Python interpreter that runs a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple


class Interpreter(NamedTuple):
    """What runs a worker.

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
