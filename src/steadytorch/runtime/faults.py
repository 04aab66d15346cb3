"""Distinguishes failures of an executor from exceptions that must reach the caller."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from steadytorch.workload.hooks import BACKWARD, ON_ALL, hooks_of

_OURS = frozenset({"torch", "triton", "steadytorch", "cudnn", "numpy", "msgspec", "builtins"})
"""Packages whose exceptions an executor may raise, besides those of the standard library."""
_TORCH = str(Path(torch.__file__).parent)
_OF_OPERATORS = (RuntimeError, NotImplementedError, MemoryError)
"""Exceptions raised by operators, including out of memory."""


class Raised(BaseException):
    """Carries an exception meant for the caller past the handlers of executor failures.

    Args:
        error: the exception to raise to the caller.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def is_callers(error: Exception, modules: Iterable[nn.Module], is_live: bool) -> bool:
    """Whether an exception raised in an executor must propagate to the caller.

    Exceptions from signal handlers (a deadline), user hooks (an early stop) and activation
    checkpointing propagate. Exception classes from other packages, such as a library's control
    flow, propagate too. If the executor runs the model itself, only operator errors are caught. Any
    remaining exception may be the executor's fault, so the untouched model answers the call.

    Args:
        error: the exception caught.
        modules: the module trees that the executor runs.
        is_live: whether the executor runs the model itself with the caller's own arguments. Then
            only errors of operators may be its fault.
    """
    if isinstance(error, _StopRecomputationError):
        return True
    root = type(error).__module__.partition(".")[0]
    if root not in _OURS and root not in sys.stdlib_module_names:
        return True
    if is_live and not isinstance(error, _OF_OPERATORS):
        return True
    passed = set(_passed(error))
    return not passed.isdisjoint(_codes(_callbacks(modules)))


def noting(raised: list[Exception], call: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps a call so that each exception is appended to `raised` and re-raised."""

    def noted() -> Any:
        try:
            return call()
        except Exception as error:
            raised.append(error)
            raise

    return noted


def _passed(error: Exception) -> Iterator[CodeType]:
    """Yields the code objects of all frames in an exception's traceback."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _callbacks(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yields all signal handlers and hooks that may run during a call."""
    for number in signal.valid_signals():
        yield signal.getsignal(number)
    for registry in ON_ALL:
        yield from registry.values()
    for module in {id(m): m for tree in modules for m in tree.modules()}.values():
        yield from hooks_of(module)
        for name in BACKWARD:
            yield from vars(module).get(name, {}).values()


def _codes(callbacks: Iterable[Any]) -> set[CodeType]:
    found = {code for callback in callbacks for code in _code_of(callback)}
    # PyTorch's own hooks are part of the model, such as weight norm.
    return {code for code in found if not code.co_filename.startswith(_TORCH)}


def _code_of(callback: Any) -> Iterator[CodeType]:
    if isinstance(callback, partial):
        yield from _code_of(callback.func)
    elif isinstance(callback, MethodType):
        yield from _code_of(callback.__func__)
    elif isinstance(callback, FunctionType):
        yield callback.__code__
    elif isinstance(found := getattr(type(callback), "__call__", None), FunctionType):  # noqa: B004
        yield found.__code__
