"""Locations of this user's caches, and checks that they are private."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Path of a cache folder, present or not; None without a home directory.

    Args:
        name: name of the folder within this package's cache.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    if os.path.isabs(caches):
        return Path(caches, "steadytorch", name)
    try:
        return Path.home() / ".cache" / "steadytorch" / name
    except (RuntimeError, OSError):
        return None


def why_not_private(seen: os.stat_result, what: str) -> str | None:
    """Returns why users other than the current user and root may write to a file or folder.

    Args:
        seen: status of the file or folder.
        what: its name in the reason.

    Returns:
        The reason, or None if it is private.
    """
    if seen.st_uid not in (os.geteuid(), 0):
        return f"{what} belongs to user {seen.st_uid}"
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {what}"
    return None


def make_private(folder: Path) -> None:
    """Creates a directory and its missing parents, accessible to this user alone.

    Raises:
        OSError: a directory cannot be created.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)
