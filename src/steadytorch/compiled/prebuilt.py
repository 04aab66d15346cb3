"""Passes previously compiled code to the `compile` transform, which never reads files itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from steadytorch.workload.workload import Workload

Call = Callable[..., Any]


class Task(NamedTuple):
    """A compilation that `compile` is about to start.

    Attributes:
        workload: the workload after the preceding transforms.
        options: returns Inductor's options, freezing included; imports the compiler.
        compiled: makes the callable that compiles at its first call.
    """

    workload: Workload
    options: Callable[[], dict[str, Any]]
    compiled: Callable[[], Call]


Source = Callable[[Task], Call | None]
"""Returns a callable to use instead of compiling, or None."""

_SOURCE: ContextVar[Source | None] = ContextVar("steadytorch_prebuilt", default=None)


@contextmanager
def supplied(source: Source | None) -> Iterator[None]:
    """Make transforms applied on this thread query `source` before they compile."""
    before = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(before)


def find(task: Task) -> Call | None:
    """Query the source set by `supplied` for compiled code; None without a source or a match."""
    source = _SOURCE.get()
    return None if source is None else source(task)
