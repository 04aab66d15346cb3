"""Formats numbers and untrusted strings as terminal text."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from steadytorch.results.measure import Measurement

_UNITS_NS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))

_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█▓▒░", "_.:-=+#@%*~", strict=True)),
    **dict(zip("▏▎▍▌▋▊▉", "||||@@@", strict=True)),
    "±": "+-",
    "…": "...",
    "µ": "u",
}
"""Replacements for characters that the terminal's encoding lacks; others become `?`."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII.get(char, "?") for char in lacking), error.end


codecs.register_error("steadytorch.ascii", _in_ascii)


@contextlib.contextmanager
def printable_anywhere() -> Iterator[None]:
    """Makes standard output and error replace characters that their encoding lacks."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, io.TextIOWrapper)]
    before = [(stream, stream.errors) for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="steadytorch.ascii")
    try:
        yield
    finally:
        for stream, errors in before:
            with contextlib.suppress(ValueError):  # closed meanwhile
                stream.reconfigure(errors=errors)


def plain(text: object) -> str:
    """The text with unprintable characters as escape sequences."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text)
    )


def markdown_text(text: object) -> str:
    """The text with every character of Markdown and HTML syntax escaped."""
    return re.sub(r"[\\`*_{}\[\]<>#|~!$&@]|:(?=//)", r"\\\g<0>", plain(text))


def unit_of(nanoseconds: float) -> tuple[str, float]:
    """The largest unit in which a time is 1 or more, and the length of that unit in ns."""
    for name, size in _UNITS_NS:
        if nanoseconds >= size:
            return name, size
    return _UNITS_NS[-1]


def duration(nanoseconds: float) -> str:
    """Formats a time with three or four digits, such as `28.71 ms`."""
    name, size = unit_of(nanoseconds)
    value = nanoseconds / size
    return f"{value:.{2 if value < 100 else 1}f} {name}"


def seconds(value: float) -> str:
    """Formats seconds as `0.4 s`, `24 s` or `3 min 20 s`."""
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def percent_above(value: float, base: float) -> str:
    """How far a value is above a base, as text such as `+4.1 %`."""
    return f"{100 * (value / base - 1):+.1f} %"


def format_drift(measured: Measurement) -> str:
    """The drift of a series in words: `no drift`, or the reason why drift is not excluded."""
    return "no drift" if measured.steady else f"drift not excluded: {measured.why_unsteady}"


def share(part: float, whole: float) -> str:
    """Formats a share of a whole, such as `4.1 %`; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Maps each reason to the names that share it, in the order of first occurrence."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def keep_words_whole(table: Table, width: int, names: Collection[int]) -> None:
    """Keeps words whole in the given columns of a table that is too wide; other columns shrink.

    A word longer than its column's share of the width is still split.

    Args:
        table: a table with all its rows, of `Text` cells.
        width: columns of the console.
        names: indices of the columns of names.
    """
    cells = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    needed = sum(max(map(len, "\n".join(each).splitlines()), default=0) + 1 for each in cells)
    if needed <= width:
        return
    for i in names:
        longest = max(len(word) for cell in cells[i] for word in cell.split())
        if longest <= width // (1 + len(names)):
            table.columns[i].width = longest


def print_indented(console: Console, text: Text, columns: int = 2, most: int | None = None) -> None:
    """Prints a paragraph indented by some columns, without trailing spaces.

    Args:
        console: where to print.
        text: the paragraph.
        columns: the indent.
        most: lines at most; a longer text ends in an ellipsis. None for no limit.
    """
    width = max(1, console.width - columns)
    lines = list(text.wrap(console, width))
    if most is not None and len(lines) > most:
        last = lines[most - 1].copy()
        last.rstrip()
        last.append(" ").append_text(lines[most])
        last.append("…")
        last.truncate(width, overflow="ellipsis")
        lines = [*lines[: most - 1], last]
    for line in lines:
        line.rstrip()
        console.print(" " * columns, line, sep="")
