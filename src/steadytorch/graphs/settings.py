"""Plain values of Python that a recorded step has read: a recording fixes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str)
_OF_MODULES = frozenset(vars(nn.Module()))
_SCHEDULED = ("p", "momentum")
"""Attributes of PyTorch's own layers that schedules change: rates of dropout and of batch norm."""


class Settings:
    """Plain attributes of the modules of a step, and plain values that its loss function reads.

    An annealed weight of the loss, or a scheduled dropout rate, changes between the steps. A value
    that the step itself sets is no change: call `remember` after the step's Python code has run.

    Args:
        modules: the module trees of the step.
        loss: the loss: a module, or a function with its closure and its globals.

    Attributes:
        values: the reference.
    """

    def __init__(self, modules: Iterable[nn.Module], loss: Any) -> None:
        own = [module for tree in modules for module in tree.modules()]
        found = [place for module in own for place in _of_module(module)]
        cells = list[CellType]()
        if not isinstance(loss, nn.Module):
            for holder in _of_callable(loss):
                if isinstance(holder, CellType):
                    cells.append(holder)
                else:
                    found.append(holder)
        self._places, self._cells = found, cells
        self.remember()

    def remember(self) -> None:
        """Takes the present values as the reference."""
        self.values = self._now()

    def changed(self) -> bool:
        """Whether a value is another since `remember`."""
        return self._now() != self.values

    def _now(self) -> list[Any]:
        values = [holder.get(name) for holder, name in self._places]
        values += map(_content, self._cells)
        return [value if isinstance(value, _PLAIN) else None for value in values]


def _of_module(module: nn.Module) -> Iterator[tuple[Mapping[str, Any], str]]:
    held = vars(module)
    if type(module).__module__.startswith("torch.nn."):
        names: Iterable[str] = (name for name in _SCHEDULED if name in held)
    else:
        names = (name for name in held if name not in _OF_MODULES)
    return ((held, name) for name in names if isinstance(held[name], _PLAIN))


def _of_callable(function: Any) -> Iterator[CellType | tuple[Mapping[str, Any], str]]:
    """Where a callable finds plain values: its closure, globals, keywords, and own attributes."""
    if isinstance(function, partial):
        yield from ((function.keywords, name) for name in function.keywords)
        yield from _of_callable(function.func)
    elif isinstance(function, MethodType):
        yield from _of_callable(function.__func__)
        yield from _of_object(function.__self__)
    elif isinstance(function, FunctionType):
        yield from function.__closure__ or ()
        names, known = function.__code__.co_names, function.__globals__
        yield from ((known, name) for name in names if isinstance(known.get(name), _PLAIN))
    else:
        yield from _of_object(function)


def _of_object(value: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from ((held, name) for name, item in held.items() if isinstance(item, _PLAIN))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
