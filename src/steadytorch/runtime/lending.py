"""Calls that work on copies of their caller's containers, until their result is handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadytorch.workload.containers import Lent


class Pending:
    """A result, and what the call wrote to containers that its caller passed.

    Attributes:
        result: of the call.
        written: copies of the arguments where it wrote to a container among them, else None.
    """

    def __init__(self, result: Any, lent: Lent) -> None:
        self.result, self._lent = result, lent
        self.written = lent.arguments if lent.is_written() else None

    def give_back(self) -> Any:
        """Writes to the caller's containers; returns the result.

        Raises:
            UnsupportedError: one of them is of a class that cannot be written to; none was.
        """
        return self._lent.give_back(self.result)


def lending(call: Callable[..., Any]) -> Callable[..., Pending]:
    """Makes a call work on copies of the containers among its arguments."""

    def lent_to(*args: Any, **kwargs: Any) -> Pending:
        lent = Lent((args, kwargs))
        args, kwargs = lent.arguments
        return Pending(call(*args, **kwargs), lent)

    return lent_to


def answer_of(result: Any) -> Any:
    """All that a call gave: its result, with what it wrote to its caller's containers."""
    return (result.result, result.written) if isinstance(result, Pending) else result
