"""Tuning candidates as data: named transforms in the order of their application."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

NOT_INSTALLED = "which is not installed: pip install"
"""Part of the reason why a transform does not apply, if an extra of steadytorch would add it."""
LONGEST_SHOWN = 40
"""Characters of a parameter in tables; a longer one is shown by its checksum."""


class TransformSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A serialisable transform, as stored in plans and sent between processes.

    Attributes:
        name: the registered name.
        parameters: the fields of its parameter struct, by name, in a fixed order.
    """

    name: str
    parameters: tuple[tuple[str, str | int | bool], ...] = ()

    def __str__(self) -> str:
        if not self.parameters:
            return self.name
        shown = [
            key if value is True else _shown(value)
            for key, value in self.parameters
            if value is not False and value != ""
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def _shown(value: str | int | bool) -> str:
    """A parameter value as text for tables; a long value is replaced by its checksum."""
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"#{zlib.crc32(text.encode()):08x}"


Candidate = tuple[TransformSpec, ...]
"""An ordered tuple of transforms; the empty one is the untouched workload."""


def describe(candidate: Iterable[object], untouched: str = "untouched") -> str:
    """The transforms of a candidate in one line, or `untouched` for the empty one."""
    return " + ".join(map(str, candidate)) or untouched
