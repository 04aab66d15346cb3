"""Where this user's caches lie, and what may be taken from there."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """A folder for one kind of cached files; it need not be there. None without a home for it.

    Args:
        name: of the folder, within that of this package.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, says the XDG base directory specification.
    if os.path.isabs(caches):
        return Path(caches, "steadytorch", name)
    try:
        return Path.home() / ".cache" / "steadytorch" / name
    except (RuntimeError, OSError):
        return None


def why_not_private(seen: os.stat_result, what: str) -> str | None:
    """What speaks against running code from a file: others than this user and root may write to it.

    Args:
        seen: its state, or that of the folder that it lies in.
        what: it is called.

    Returns:
        None where nothing does.
    """
    if seen.st_uid not in (os.geteuid(), 0):
        return f"{what} belongs to user {seen.st_uid}"
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {what}"
    return None


def make_private(folder: Path) -> None:
    """Makes a directory and its missing parents, for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)
