"""The folder that a process shares with its workers."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A private temporary folder, removed at the end of the block, or of the process within it.

    A thread that does not keep the process alive never comes to the end of its block. Workers that
    were started within it have ended by then, see `Worker`.
    """
    folder, owner = Path(tempfile.mkdtemp(prefix="steadytorch-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork of the process ends without it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    try:
        yield folder
    finally:
        atexit.unregister(remove)
        remove()
