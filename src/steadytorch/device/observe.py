"""Reading what may not be readable: a value, or the reason why there is none.

Every fact about a machine can be missing somewhere (a container hides it, a permission is refused,
a library is not installed). A missing one costs its own field and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from steadytorch.errors import UnsupportedError

T = TypeVar("T")

NOT_ON_CPU = "does not apply to a CPU"
"""The reason of fields that only a GPU has; a report need not repeat it."""

_REASON_LIMIT = 300


class NotObservable(UnsupportedError):  # noqa: N818  (an expected outcome inside this room)
    """A value cannot be observed here; the message is the reason, fit to be shown."""


class Readings:
    """Collects values one by one; a reading that fails becomes None and leaves its reason.

    Attributes:
        unknown: Field name to the reason why that field could not be observed.
    """

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def read(self, field: str, reading: Callable[[], T]) -> T | None:
        """Returns `reading()`, or None with the reason noted under `field`."""
        try:
            return reading()
        except Exception as error:
            # Drivers, /proc and injected libraries fail in ways no list can foresee, and a report
            # about the machine must not die of one field.
            self.refuse((field,), error)
            return None

    def refuse(self, fields: tuple[str, ...], why: Exception | str) -> None:
        """Notes the same reason for all of `fields`; a reason noted earlier stays."""
        text = why if isinstance(why, str) else reason_of(why)
        for field in fields:
            self.unknown.setdefault(field, text)


def reason_of(error: Exception) -> str:
    """One line, at most 300 characters, that says why a reading failed."""
    text = " ".join(str(error).split())
    if not isinstance(error, NotObservable):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 3] + "..."
