"""Read recorded operator inputs: shapes, element types and settings."""

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
"""Element size by the profiler's type name; other inputs are not tensors."""

DTYPES = {
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
    "short int": "int16",
    "int": "int32",
    "long int": "int64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
}
"""PyTorch's names of these types."""

_INTS = re.compile(r"\[([-\d, ]*)\]")
_MOST_DIMENSIONS = 64
"""PyTorch's own limit; a trace may hold anything."""


class NotRecordedError(Exception):
    """A value is missing from the trace or invalid."""


class Operands:
    """Reader for one operator's entry in `Trace.inputs`; positions follow the operator's schema.

    Every method raises `NotRecordedError` if the trace lacks the requested value.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self._inputs = inputs

    def __len__(self) -> int:
        types = self._inputs.get("types")
        return len(types) if isinstance(types, list) else 0

    def is_tensor(self, position: int) -> bool:
        """Whether the input at this position is a tensor."""
        kind = self._entry("types", position, default="")
        return isinstance(kind, str) and kind in ITEM_BYTES

    def tensors(self) -> list[int]:
        """Return the positions of all tensor inputs."""
        return [position for position in range(len(self)) if self.is_tensor(position)]

    def kind(self, position: int) -> str:
        """Return the element type of a tensor, as the profiler names it."""
        if not self.is_tensor(position):
            raise NotRecordedError(f"input {position} is not a tensor")
        return self._entry("types", position)

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of a dense tensor; the profiler records no strides of sparse ones."""
        self.kind(position)
        dims = self._entry("dims", position)
        if dims and self._entry("strides", position, default=None) == []:
            raise NotRecordedError(f"input {position} is sparse")
        if not isinstance(dims, list) or len(dims) > _MOST_DIMENSIONS:
            raise NotRecordedError(f"no shape of input {position}")
        if not all(isinstance(size, int) and size >= 0 for size in dims):
            raise NotRecordedError(f"no shape of input {position}")
        return tuple(dims)

    def elements(self, position: int) -> int:
        """Return the number of elements of a tensor."""
        return math.prod(self.shape(position))

    def bytes(self, position: int) -> int:
        """Return a tensor's memory in bytes; expanded dimensions (stride 0) count once."""
        shape = self.shape(position)
        strides = self._entry("strides", position, default=None)
        if isinstance(strides, list) and len(strides) == len(shape):
            shape = [size for size, stride in zip(shape, strides, strict=True) if stride != 0]
        return math.prod(shape) * self.item_bytes(position)

    def bytes_if_tensor(self, *positions: int | None) -> int:
        """Return the total memory in bytes of the tensors at these positions."""
        return sum(self.bytes(p) for p in positions if p is not None and self.is_tensor(p))

    def item_bytes(self, position: int) -> int:
        """Return the size of one tensor element in bytes."""
        return ITEM_BYTES[self.kind(position)]

    def text(self, position: int) -> str:
        """Return a non-tensor input as the profiler printed it; empty if none was given."""
        value = self._entry("concrete", position)
        if not isinstance(value, str):
            raise NotRecordedError(f"no value of input {position}")
        return value

    def integers(self, position: int, length: int) -> list[int]:
        """Return integers; a single value is repeated to `length`, an empty list stays empty."""
        found = _INTS.fullmatch(self.text(position))
        if found is None:
            raise NotRecordedError(f"input {position} is not a list of integers")
        values = [int(word) for word in found[1].replace(",", " ").split()]
        if len(values) not in (0, 1, length):
            raise NotRecordedError(f"input {position} is not of length {length}")
        return values * length if len(values) == 1 else values

    def integer(self, position: int) -> int:
        """Return an input that is a single integer."""
        found = re.fullmatch(r"-?\d{1,18}", self.text(position))
        if found is None:
            raise NotRecordedError(f"input {position} is not an integer")
        return int(found[0])

    def flags(self, position: int) -> list[bool]:
        """Return an input that is a list of booleans."""
        return [word == "True" for word in self.text(position).strip("[]").split(", ")]

    def flag(self, position: int) -> bool:
        """Return an input that is a single boolean."""
        return self.flags(position) == [True]

    def _entry(self, key: str, position: int, **default: Any) -> Any:
        values = self._inputs.get(key)
        if isinstance(values, list) and 0 <= position < len(values):
            return values[position]
        if "default" in default:
            return default["default"]
        raise NotRecordedError(f"{key} of input {position} were not recorded")
