"""An operator's inputs as the profiler recorded them: shapes, element types, values of settings."""

from __future__ import annotations

import math
import re
from typing import Any

ITEM_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short int": 2,
    "int": 4,
    "long int": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "float": 4,
    "double": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e5m2fnuz": 1,
}
"""Size of an element by the name the profiler gives its type; other inputs are no tensors."""

DTYPES = {
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
}
"""Floating-point types by PyTorch's names."""

_INTS = re.compile(r"\[([-\d, ]*)\]")
_MOST_DIMENSIONS = 64
"""PyTorch's own limit; a trace may say anything."""


class NotRecordedError(Exception):
    """What was asked for is not in the trace, or makes no sense."""


class Operands:
    """Reads one entry of `Trace.inputs`; positions are those of the operator's schema.

    Every method raises `NotRecordedError` where the trace does not say.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self._inputs = inputs

    def __len__(self) -> int:
        types = self._inputs.get("types")
        return len(types) if isinstance(types, list) else 0

    def is_tensor(self, position: int) -> bool:
        """Whether a tensor was given there."""
        kind = self._entry("types", position, default="")
        return isinstance(kind, str) and kind in ITEM_BYTES

    def tensors(self) -> list[int]:
        """Positions of all tensors."""
        return [position for position in range(len(self)) if self.is_tensor(position)]

    def kind(self, position: int) -> str:
        """A tensor's element type, by the profiler's name."""
        if not self.is_tensor(position):
            raise NotRecordedError(f"input {position} is no tensor")
        return self._entry("types", position)

    def shape(self, position: int) -> tuple[int, ...]:
        """A tensor's shape."""
        self.kind(position)
        dims = self._entry("dims", position)
        if not isinstance(dims, list) or len(dims) > _MOST_DIMENSIONS:
            raise NotRecordedError(f"no shape of input {position}")
        if not all(isinstance(size, int) and size >= 0 for size in dims):
            raise NotRecordedError(f"no shape of input {position}")
        return tuple(dims)

    def elements(self, position: int) -> int:
        """How many elements a tensor has."""
        return math.prod(self.shape(position))

    def bytes(self, position: int) -> int:
        """Memory a tensor occupies; what is expanded (stride 0) lies there once."""
        shape = self.shape(position)
        strides = self._entry("strides", position, default=None)
        if isinstance(strides, list) and len(strides) == len(shape):
            shape = [size for size, stride in zip(shape, strides, strict=True) if stride != 0]
        return math.prod(shape) * self.item_bytes(position)

    def bytes_if_tensor(self, *positions: int | None) -> int:
        """Of those positions that hold tensors, together."""
        return sum(self.bytes(p) for p in positions if p is not None and self.is_tensor(p))

    def item_bytes(self, position: int) -> int:
        """Size of one element of a tensor."""
        return ITEM_BYTES[self.kind(position)]

    def text(self, position: int) -> str:
        """The value of a setting as the profiler printed it; empty where none was given."""
        value = self._entry("concrete", position)
        if not isinstance(value, str):
            raise NotRecordedError(f"no value of input {position}")
        return value

    def integers(self, position: int, length: int) -> list[int]:
        """A list of integers; one that stands for all is repeated, an empty one stays empty."""
        found = _INTS.fullmatch(self.text(position))
        if found is None:
            raise NotRecordedError(f"input {position} is no list of integers")
        values = [int(word) for word in found[1].replace(",", " ").split()]
        if len(values) not in (0, 1, length):
            raise NotRecordedError(f"input {position} is not of length {length}")
        return values * length if len(values) == 1 else values

    def integer(self, position: int) -> int:
        """One integer."""
        found = re.fullmatch(r"-?\d{1,18}", self.text(position))
        if found is None:
            raise NotRecordedError(f"input {position} is no integer")
        return int(found[0])

    def flags(self, position: int) -> list[bool]:
        """A list of booleans."""
        return [word == "True" for word in self.text(position).strip("[]").split(", ")]

    def flag(self, position: int) -> bool:
        """One boolean."""
        return self.flags(position) == [True]

    def _entry(self, key: str, position: int, **default: Any) -> Any:
        values = self._inputs.get(key)
        if isinstance(values, list) and 0 <= position < len(values):
            return values[position]
        if "default" in default:
            return default["default"]
        raise NotRecordedError(f"{key} of input {position} were not recorded")
