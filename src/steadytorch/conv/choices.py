"""Text format for engine choices: which cuDNN engine runs each convolution of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from steadytorch.conv.problem import parse
from steadytorch.errors import UsageError

ATEN = "aten"
"""Engine name for PyTorch's own choice."""
HEURISTIC = ""
"""Engine name for the first plan of cuDNN's heuristics."""
MOST_BYTES = 1 << 18
"""Maximum size of stored choices; those of a ResNet-50 take 3 kB."""

_ENGINE = r"aten|eng\d{1,4}(?:_k\d{1,4}=-?\d{1,10})*"
_GRAMMAR = re.compile(
    rf"(?:c(?P<channels>[1-9]\d{{0,3}}):)?(?:(?P<number>fp16|bf16):)?(?P<engine>{_ENGINE})",
    re.ASCII,
)


class Choice(msgspec.Struct, frozen=True):
    """How to run one convolution: engine, padding of channels, and 16-bit type.

    Attributes:
        engine: a plan's name, ATEN or HEURISTIC.
        channels: number of input channels after zero padding; None for no padding.
        number: other 16-bit type to compute in, with the result converted back; None for the
            problem's own type.
    """

    engine: str = HEURISTIC
    channels: int | None = None
    number: Literal["fp16", "bf16"] | None = None

    def __str__(self) -> str:
        channels = "" if self.channels is None else f"c{self.channels}:"
        number = "" if self.number is None else f"{self.number}:"
        return f"{channels}{number}{self.engine}"


def read_choice(text: str) -> Choice:
    """Parse an engine choice such as `c4:eng48`.

    Raises:
        UsageError: the text has another form.
    """
    found = _GRAMMAR.fullmatch(text)
    if found is None:
        raise UsageError(f"{text[:80]!r} is not an engine choice like eng41_k2=4 or c4:eng48")
    channels, number = found["channels"], found["number"]
    return Choice(
        found["engine"],
        None if channels is None else int(channels),
        None if number is None else msgspec.convert(number, Literal["fp16", "bf16"]),
    )


def read_choices(text: str) -> dict[str, Choice]:
    """Parse the output of `write_choices` into choices by problem key; no choices for "".

    Raises:
        UsageError: the text exceeds `MOST_BYTES` or is malformed.
    """
    if not text:
        return {}
    if len(text) > MOST_BYTES:
        raise UsageError(f"engine choices take at most {MOST_BYTES} bytes, got {len(text)}")
    try:
        named = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UsageError(f"engine choices are not a JSON object of strings: {error}") from None
    for key in named:
        parse(key)
    return {key: read_choice(value) for key, value in named.items()}


def write_choices(choices: Mapping[str, Choice]) -> str:
    """Serialise choices as compact JSON, sorted by key; "" if there are no choices."""
    named = {key: str(choices[key]) for key in sorted(choices)}
    return msgspec.json.encode(named).decode() if named else ""
