"""A temporary folder shared with worker processes."""

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
    """Create a private temporary folder; remove it when the `with` block or the process ends.

    The folder is also removed at process exit, because a daemon thread may never reach the end of
    its `with` block. At exit, `Worker` kills the workers that use the folder before the folder is
    removed.
    """
    folder, owner = Path(tempfile.mkdtemp(prefix="steadytorch-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not remove it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    try:
        yield folder
    finally:
        atexit.unregister(remove)
        remove()
