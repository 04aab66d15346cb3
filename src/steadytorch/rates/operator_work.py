"""Minimum work of an operator: bytes moved and floating-point operations."""

from __future__ import annotations

from typing import Any, NamedTuple

from steadytorch.rates.memory_passes import GENERATED, PASSES, WRAPPED_PASSES, generated
from steadytorch.rates.products import PRODUCTS, WRAPPED_PRODUCTS
from steadytorch.traces.operands import DTYPES, NotRecordedError, Operands

WRAPPERS = frozenset({*WRAPPED_PRODUCTS, *WRAPPED_PASSES})
"""Operators whose work belongs to an operator they call, if the trace shows that call."""
MATRIX = frozenset({*PRODUCTS, *WRAPPED_PRODUCTS})
"""Products: operators that can use tensor cores."""

FORMULAS = PRODUCTS | WRAPPED_PRODUCTS | PASSES | WRAPPED_PASSES
"""All formulas by name of the operator."""
_RATED = ("float16", "bfloat16", "float32", "float64")
"""Types of arithmetic with a measured rate."""


class Work(NamedTuple):
    """Minimum work of an operator.

    Attributes:
        flops: floating-point operations; one multiplication and one addition are two.
        bytes: read from and written to the device's memory, each operand once.
        dtype: type of the first tensor, such as "bfloat16"; None if it is not floating-point.
    """

    flops: int
    bytes: int
    dtype: str | None


def work_of(name: str, inputs: dict[str, Any] | None) -> Work | None:
    """Work of one operator call; None if the operator or a required input is unknown.

    Formulas and their sources are in `products` and `memory_passes`.

    Args:
        name: name of the operator, such as "aten::addmm".
        inputs: an entry of `Trace.inputs`.
    """
    formula = generated if name.startswith(GENERATED) else FORMULAS.get(name)
    if formula is None or inputs is None:
        return None
    given = Operands(inputs)
    try:
        flops, moved = formula(given)
        kinds = [given.kind(place) for place in given.tensors()]
    except NotRecordedError:
        return None
    if flops < 0 or moved <= 0:
        return None
    names = map(DTYPES.__getitem__, kinds)
    return Work(flops, moved, next((name for name in names if name in _RATED), None))
