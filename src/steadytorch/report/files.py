"""Writes HTML pages, and Plotly's script beside the pages."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import re
import stat
from functools import cache
from pathlib import Path

from steadytorch.errors import UsageError
from steadytorch.report.text import plain


@cache
def plotly_name() -> str:
    """The file name of Plotly's script beside a page, which includes Plotly's version."""
    from plotly.offline import get_plotlyjs_version

    return f"plotly-{get_plotlyjs_version()}.min.js"


def plotly_packed() -> str:
    """Plotly's script, gzip-compressed and base64-encoded."""
    return base64.b64encode(gzip.compress(_plotly().encode(), mtime=0)).decode()


def plotly_hash() -> str:
    """The hash of Plotly's script, in the form that `script_hash` returns."""
    return script_hash(_plotly())


def script_hash(script: str) -> str:
    """The base64 SHA-256 hash of a script, as used in a content security policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def share_plotly(page: str, target: Path) -> list[Path]:
    """Writes Plotly's script beside a page that loads the script, unless already there.

    Args:
        page: the page, as HTML.
        target: the file of the page.

    Returns:
        The file that the page needs beside it, if any.

    Raises:
        UsageError: the file cannot be written.
    """
    # Quotes in the texts of a result are escaped, so that none looks like this.
    found = re.search(r' id="plotly" data-plotly="([\w.+-]+)"></script>', page)
    if found is None:
        return []
    shared, script = target.with_name(found[1]), _plotly()
    if not _holds(shared, script.encode()):
        check(target, shared)
        write(shared, script)
    return [shared]


def _holds(file: Path, content: bytes) -> bool:
    try:
        return file.is_file() and file.read_bytes() == content
    except OSError:
        return False


def stands_alone(target: Path) -> bool:
    """Whether a page cannot have a file beside it: the target is standard output or a device."""
    return target == Path("-") or (target.exists() and not target.is_file())


def check(source: Path, target: Path) -> None:
    """Raises an error early if the target of a page cannot be written.

    Args:
        source: a file that must stay as it is.
        target: the file to write.

    Raises:
        UsageError: the target is the source, no regular file or not writable.
    """
    name = plain(target)
    try:
        if target.exists() and target.samefile(source):
            raise UsageError(f"{name} is the result itself: name another file for the page")
        # Renaming onto a device would replace it.
        if target.exists() and not target.is_file():
            raise UsageError(f"{name} is no regular file: name another one for the page")
        if not target.parent.is_dir():
            raise UsageError(f"{name} cannot be written: there is no folder {plain(target.parent)}")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise UsageError(f"{name} cannot be written: no permission")
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{name} cannot be written: {error}") from error


def write(target: Path, text: str) -> None:
    """Writes a file atomically; on failure, an existing file is unchanged.

    Raises:
        UsageError: the file cannot be written.
    """
    from steadytorch.plan.files import write_whole

    try:
        # Replace the target of a link, and keep its permissions.
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
        write_whole(target.resolve(), text.encode(), mode=mode)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{plain(target)} cannot be written: {why}") from error
