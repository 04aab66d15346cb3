"""Figures and foreign strings as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNITS_NS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))


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
