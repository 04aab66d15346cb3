"""Runs calls on copies of the caller's containers; writes are passed on with the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadytorch.workload.containers import BorrowedArguments


class Pending:
    """A result together with pending writes to the caller's containers.

    Attributes:
        result: the result of the call.
        written: the copied arguments if the call wrote to a container among them, else None.
    """

    def __init__(self, result: Any, borrowed: BorrowedArguments) -> None:
        self.result, self._borrowed = result, borrowed
        self.written = borrowed.arguments if borrowed.is_written() else None

    def give_back(self) -> Any:
        """Passes writes on to the caller's containers and returns the result.

        Raises:
            UnsupportedError: a container's class cannot be written to; nothing was written.
        """
        return self._borrowed.give_back(self.result)


def lending(call: Callable[..., Any]) -> Callable[..., Pending]:
    """Wraps a call so that it works on copies of the containers among its arguments."""

    def lent_to(*args: Any, **kwargs: Any) -> Pending:
        borrowed = BorrowedArguments((args, kwargs))
        args, kwargs = borrowed.arguments
        return Pending(call(*args, **kwargs), borrowed)

    return lent_to


def answer_of(result: Any) -> Any:
    """The result of a call, with its pending writes to containers if any."""
    return (result.result, result.written) if isinstance(result, Pending) else result
