"""Figures and foreign strings as people read them in a terminal."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNITS_NS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))

_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█▓▒░", "_.:-=+#@%*~", strict=True)),
    **dict(zip("▏▎▍▌▋▊▉", "||||@@@", strict=True)),
    "±": "+-",
    "…": "...",
    "µ": "u",
}
"""Stands for what a terminal's encoding lacks; all else becomes a question mark."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII.get(char, "?") for char in lacking), error.end


codecs.register_error("steadytorch.ascii", _in_ascii)


@contextlib.contextmanager
def printable_anywhere() -> Iterator[None]:
    """Has standard output and error replace characters that their encoding lacks."""
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
    """The text with everything a terminal would act on, or hide, written as an escape sequence."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text)
    )


def unit_of(nanoseconds: float) -> tuple[str, float]:
    """The unit a time is best read in, and how many ns it has."""
    for name, size in _UNITS_NS:
        if nanoseconds >= size:
            return name, size
    return _UNITS_NS[-1]


def duration(nanoseconds: float) -> str:
    """A time to three or four digits, such as `28.71 ms`."""
    name, size = unit_of(nanoseconds)
    value = nanoseconds / size
    return f"{value:.{2 if value < 100 else 1}f} {name}"


def seconds(value: float) -> str:
    """Seconds as `0.4 s`, `24 s` or `3 min 20 s`."""
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def percent_above(value: float, base: float) -> str:
    """How far a value lies above a base, such as `+4.1 %`."""
    return f"{100 * (value / base - 1):+.1f} %"


def share(part: float, whole: float) -> str:
    """A part of a whole such as `4.1 %`; a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Each reason with all that it is the reason for, in the order met."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def print_indented(console: Console, text: Text, columns: int = 2) -> None:
    """Prints a paragraph some columns in; unlike padding, it leaves no blanks at the ends."""
    for line in text.wrap(console, max(1, console.width - columns)):
        line.rstrip()
        console.print(" " * columns, line, sep="")
