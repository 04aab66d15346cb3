"""Runs calls on copies of the caller's containers, then copies changes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadytorch.workload.containers import BorrowedArguments


class Pending:
    """A call's result, with writes that the caller's containers have not received yet.

    Attributes:
        result: the result of the call.
        written: the copied arguments if the call wrote to a container among them, else None.
    """

    def __init__(self, result: Any, borrowed: BorrowedArguments) -> None:
        self.result, self._borrowed = result, borrowed
        self.written = borrowed.arguments if borrowed.is_written() else None

    def give_back(self) -> Any:
        """Copies pending writes to the caller's containers and returns the result.

        Raises:
            UnsupportedError: a container's class cannot be written to; nothing was written.
        """
        return self._borrowed.give_back(self.result)


def lending(call: Callable[..., Any]) -> Callable[..., Pending]:
    """Wraps a call so that it runs on copies of the containers among its arguments."""

    def lent_to(*args: Any, **kwargs: Any) -> Pending:
        borrowed = BorrowedArguments((args, kwargs))
        args, kwargs = borrowed.arguments
        return Pending(call(*args, **kwargs), borrowed)

    return lent_to


def answer_of(result: Any) -> Any:
    """Returns a call's result; for a `Pending`, the pair of its `result` and `written`."""
    return (result.result, result.written) if isinstance(result, Pending) else result
