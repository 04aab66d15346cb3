"""What an operator has to do at the least: bytes moved and floating-point operations."""

from __future__ import annotations

from typing import Any, NamedTuple

from steadytorch.rates.memory_passes import GENERATED, PASSES, WRAPPED_PASSES, generated
from steadytorch.rates.products import PRODUCTS, WRAPPED_PRODUCTS
from steadytorch.traces.operands import DTYPES, NotRecordedError, Operands

WRAPPERS = frozenset({*WRAPPED_PRODUCTS, *WRAPPED_PASSES})
"""Operators whose work is that of an operator they call, where such a call is seen."""
MATRIX = frozenset({*PRODUCTS, *WRAPPED_PRODUCTS})
"""Products: operators that tensor cores can take."""

_FORMULAS = PRODUCTS | WRAPPED_PRODUCTS | PASSES | WRAPPED_PASSES


class Work(NamedTuple):
    """What an operator has to do.

    Attributes:
        flops: floating-point operations; one multiplication and addition are two.
        bytes: read from and written to the device's memory, each operand once.
        dtype: of the first tensor, as "bfloat16"; None if it is not of a floating-point type.
    """

    flops: int
    bytes: int
    dtype: str | None


def work_of(name: str, inputs: dict[str, Any] | None) -> Work | None:
    """The work of one call of an operator; None where it, or an input it needs, is unknown.

    Formulas and their sources stand in `products` and `passes`.

    Args:
        name: the operator's, as "aten::addmm".
        inputs: as recorded, an entry of `Trace.inputs`.
    """
    formula = generated if name.startswith(GENERATED) else _FORMULAS.get(name)
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
    return Work(flops, moved, next((DTYPES[kind] for kind in kinds if kind in DTYPES), None))
