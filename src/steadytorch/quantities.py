"""Parses and formats times, sizes and counts."""

from __future__ import annotations

import re

from steadytorch.errors import UsageError

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_BYTES |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_duration(text: str | float) -> float:
    """Parses `90`, `90s`, `3m`, `1.5h` or `500ms` to seconds.

    Raises:
        UsageError: not a positive time.
    """
    return _parse(str(text), _SECONDS, 1e-9, "a time such as 90s, 3m or 1h")


def parse_bytes(text: str | int) -> int:
    """Parses `8GiB`, `500MB` or a plain number to bytes.

    Raises:
        UsageError: not a positive size.
    """
    return int(_parse(str(text), _BYTES, 1, "a size such as 8GiB or 500MB"))


def size(byte_count: float) -> str:
    """Formats a size in bytes, such as `1.23 GiB`."""
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if byte_count >= factor:
            digits = 2 if byte_count < 10 * factor else 1 if byte_count < 100 * factor else 0
            return f"{byte_count / factor:.{digits}f} {name}"
    return f"{byte_count:.0f} B"


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun, such as `1,234 calls`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _parse(text: str, units: dict[str, float] | dict[str, int], least: float, kind: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None or not least <= float(match[1]) * factor < 1e18:
        raise UsageError(f"{text!r} is not {kind}")
    return float(match[1]) * factor
