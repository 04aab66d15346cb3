"""Choices as text: which engine each convolution of a plan runs with. Data only, closed grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from steadytorch.conv.problem import parse
from steadytorch.errors import UsageError

ATEN = "aten"
"""The engine that stands for PyTorch's own choice."""
HEURISTIC = ""
"""The engine that stands for the first plan of cuDNN's heuristics."""
MOST_BYTES = 1 << 18
"""Far more than any network needs: a ResNet-50's choices take 3 kB."""

_ENGINE = r"aten|eng\d{1,4}(?:_k\d{1,4}=-?\d{1,10})*"
_GRAMMAR = re.compile(
    rf"(?:c(?P<channels>[1-9]\d{{0,3}}):)?(?:(?P<number>fp16|bf16):)?(?P<engine>{_ENGINE})",
    re.ASCII,
)


class Choice(msgspec.Struct, frozen=True):
    """How one convolution is run.

    Attributes:
        engine: a plan's name, ATEN or HEURISTIC.
        channels: input channels it is padded to with zeros; None for those it has.
        number: 16-bit type it computes in if not its own, its result converted back; None for its
            own.
    """

    engine: str = HEURISTIC
    channels: int | None = None
    number: Literal["fp16", "bf16"] | None = None

    def __str__(self) -> str:
        channels = "" if self.channels is None else f"c{self.channels}:"
        number = "" if self.number is None else f"{self.number}:"
        return f"{channels}{number}{self.engine}"


def read_choice(text: str) -> Choice:
    """The choice that a text such as `c4:eng48` names.

    Raises:
        UsageError: it has another form.
    """
    found = _GRAMMAR.fullmatch(text)
    if found is None:
        raise UsageError(f"{text[:80]!r} is no choice of an engine, such as eng41_k2=4 or c4:eng48")
    channels, number = found["channels"], found["number"]
    return Choice(
        found["engine"],
        None if channels is None else int(channels),
        None if number is None else msgspec.convert(number, Literal["fp16", "bf16"]),
    )


def read_choices(text: str) -> dict[str, Choice]:
    """Choices by problem key, from the JSON object that `write_choices` wrote; empty for "".

    Raises:
        UsageError: the text is longer than any network needs, or a part of it has another form.
    """
    if not text:
        return {}
    if len(text) > MOST_BYTES:
        raise UsageError(f"choices of engines take at most {MOST_BYTES} bytes, got {len(text)}")
    try:
        named = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UsageError(f"choices of engines are no JSON object of texts: {error}") from None
    for key in named:
        parse(key)
    return {key: read_choice(value) for key, value in named.items()}


def write_choices(choices: Mapping[str, Choice]) -> str:
    """The choices as compact JSON, the same text for the same choices."""
    named = {key: str(choices[key]) for key in sorted(choices)}
    return msgspec.json.encode(named).decode() if named else ""
