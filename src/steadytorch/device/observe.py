"""Readings that may fail: each gives a value, or the reason why the value is missing.

Any fact about a machine can be missing: hidden by a container, denied, or behind a library that is
not installed. A missing fact does not affect the other facts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from steadytorch.errors import UnsupportedError

T = TypeVar("T")

NOT_ON_CPU = "does not apply to a CPU"
"""Reason of GPU-only fields on a CPU; reports may omit it."""

_REASON_LIMIT = 300


class NotObservable(UnsupportedError):  # noqa: N818  (an expected outcome inside this room)
    """A value cannot be observed here; the message is a reason to show to the user."""


class Readings:
    """Collector of values; a failed reading becomes None, and its reason is kept in `unknown`.

    Attributes:
        unknown: Reason for each field that could not be observed, by field name.
    """

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def read(self, field: str, reading: Callable[[], T]) -> T | None:
        """Return `reading()`; on failure, store the reason under `field` and return None."""
        try:
            return reading()
        except Exception as error:
            # Drivers, /proc and injected libraries can raise anything, and one field must not
            # abort the whole report.
            self.refuse((field,), error)
            return None

    def refuse(self, fields: tuple[str, ...], why: Exception | str) -> None:
        """Store one reason for all of `fields`; earlier reasons are kept."""
        text = why if isinstance(why, str) else reason_of(why)
        for field in fields:
            self.unknown.setdefault(field, text)


def reason_of(error: Exception) -> str:
    """Format the reason of a failed reading as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    if not isinstance(error, NotObservable):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 3] + "..."
