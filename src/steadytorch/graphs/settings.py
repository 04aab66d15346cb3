"""Detect changes of plain Python values that a recorded step has baked in."""

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
    """Plain Python attributes of a step's modules, and plain values that its loss reads.

    Values that change between steps are, for example, an annealed loss weight or a scheduled
    dropout rate. Call `remember` after the step's Python code has run, so that values set by the
    step itself do not count as changed.

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
        """Takes the current values as the reference for `changed`."""
        self.values = self._now()

    def changed(self) -> bool:
        """Whether any value has changed since the last `remember`."""
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
    """Places of plain values in a callable: closure, globals, keyword arguments, attributes."""
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
