"""Convert decimal microseconds, given as text, to integer nanoseconds.

A Unix time in microseconds has 16 digits before the decimal point. A float64 resolves such a time
only to 0.25 us, so the text is parsed without floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

import numpy as np

WIDTH = 24
"""Longer numbers take the slow path; `1712195495519689.047` has 20 characters."""

LARGEST_NS = 2**62
"""Larger times are invalid (146 years after 1970), and differences must fit into int64."""

ABSURD = -(2**63)
"""Marks a number that is missing, not finite, or beyond `LARGEST_NS`."""

_DOT = ord(".")


def nanoseconds(texts: Sequence[bytes]) -> np.ndarray:
    """Convert decimal microseconds to ns, rounded half up.

    Args:
        texts: JSON numbers, plain or quoted; an empty text means none.

    Returns:
        int64, shape (texts,); `ABSURD` where a text is not a number within range.
    """
    if not texts:
        return np.empty(0, np.int64)
    array = np.array(texts, dtype=f"S{WIDTH}")
    characters = array.view(np.uint8).reshape(len(texts), WIDTH)
    values, plain = _plain(np.ascontiguousarray(characters.T))
    for row in np.flatnonzero(~plain).tolist():
        values[row] = _any(texts[row])
    return values


def _plain(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parse numbers in plain format; also return a mask of the rows in plain format.

    A plain number has only digits, at most one decimal point, and at most 16 digits before the
    point.
    """
    rows = columns.shape[1]
    values = np.zeros(rows, np.int64)
    before, after = np.zeros(rows, np.int8), np.zeros(rows, np.int8)
    pointed, odd = np.zeros(rows, bool), np.zeros(rows, bool)
    for column in columns:
        if not column.any():
            break
        digit = column - np.uint8(48)
        is_digit = digit < 10
        is_point = column == _DOT
        odd |= ~(is_digit | is_point | (column == 0)) | (is_point & pointed)
        kept = is_digit & (after < 3)
        values = np.where(kept, values * 10 + digit, values)
        values += is_digit & (after == 3) & (digit >= 5)
        after += is_digit & pointed
        before += is_digit & ~pointed
        pointed |= is_point
    # Below 5e15 the product fits into int64; valid times are smaller.
    small = (before < 16) | ((before == 16) & (columns[0] < ord("5")))
    values = values * np.array([1000, 100, 10, 1])[np.minimum(after, 3)]
    return values, ~odd & small & (before > 0) & (columns[-1] == 0) & (values < LARGEST_NS)


def _any(text: bytes) -> int:
    try:
        number = Decimal(text.strip(b'"').decode("ascii"))
    except (InvalidOperation, UnicodeDecodeError):
        return ABSURD
    # Check the exponent first: an integer of 1e999999999 would exhaust memory.
    if not number.is_finite() or (number and number.adjusted() > 18):
        return ABSURD
    value = int((number * 1000).to_integral_value(ROUND_HALF_UP))
    return value if abs(value) < LARGEST_NS else ABSURD
