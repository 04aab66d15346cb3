"""Compiled code that was made before: how it reaches `compile`, which knows of no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from steadytorch.workload.workload import Workload

Call = Callable[..., Any]


class Task(NamedTuple):
    """What `compile` is about to compile.

    Attributes:
        workload: as the transforms before left it.
        options: Inductor's, freezing among them; asking for them imports the compiler.
        compiled: makes the callable that compiles at its first call.
    """

    workload: Workload
    options: Callable[[], dict[str, Any]]
    compiled: Callable[[], Call]


Source = Callable[[Task], Call | None]
"""Gives what is to run in place of compiling, None where there is nothing."""

_SOURCE: ContextVar[Source | None] = ContextVar("steadytorch_prebuilt", default=None)


@contextmanager
def supplied(source: Source | None) -> Iterator[None]:
    """While this is open, transforms applied on this thread ask `source` before they compile."""
    before = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(before)


def find(task: Task) -> Call | None:
    """What the source in force has for a task; None where there is none, or it has nothing."""
    source = _SOURCE.get()
    return None if source is None else source(task)
