"""Detects changes of Python values and tensors that a recorded step has baked in."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from steadytorch.workload.contents import checksum, home_of
from steadytorch.workload.reads import MOST_ITEMS, OF_MODULES, PLAIN, Reads, environment, set_first

_ARRAYS = (np.ndarray, array, bytearray)


class Settings:
    """Values that a step's code reads and that its graph would keep: those of modules and the loss.

    Values that change between steps are, for example, an annealed loss weight, a scheduled dropout
    rate, a replaced tensor of class weights, or the mode of a module in the loss. Call `remember`
    after the step's Python code has run, so that values set by the step itself do not count as
    changed.

    `Settings` reads the values from attributes of modules, and from globals, closures, objects and
    containers that the loss or the `forward` of a user-defined module reads.

    Numbers, strings and containers are compared by value, functions and other objects by identity.
    A tensor counts as changed if its memory does. A CPU tensor of one element also counts as
    changed if its value does, because kernels get the value as an argument. Of an array, the first
    64 KiB and samples of the rest are compared.

    Args:
        modules: the module trees of the step.
        loss: the loss: a module or another callable.

    Attributes:
        values: the reference.
        fixed: the values that graphs fix: those of `values` that a step does not itself set before
            it reads them.
        read: what the loss and user-defined modules read outside of the modules' attributes.
    """

    def __init__(self, modules: Iterable[nn.Module], loss: Any) -> None:
        own = [module for tree in modules if tree is not loss for module in tree.modules()]
        read = Reads()
        read.loss(loss)
        known = set(map(id, own))
        of_loss = {
            id(module): module
            for tree in read.modules
            for module in tree.modules()
            if id(module) not in known
        }
        self._layers = [_of_layer(module) for module in own if _is_layer(module)]
        found = [place for module in own if not _is_layer(module) for place in _of_module(module)]
        for module in of_loss.values():
            found += _of_module(module, "training")
        for module in (*own, *of_loss.values()):
            read.forward(module)
        self._places, self.read = found, read
        first = {id(vars(module)): set_first(module) for module in (*own, *of_loss.values())}
        self._own = {i for i, (held, name) in enumerate(found) if name in first[id(held)]}
        self.remember()

    def remember(self) -> None:
        """Takes the current values as the reference for `changed`."""
        self.values = self._now()
        self.fixed = [None if i in self._own else each for i, each in enumerate(self.values)]

    def changed(self) -> bool:
        """Whether any value has changed since the last `remember`."""
        return self._now() != self.values

    def _now(self) -> list[Any]:
        values = [holder.get(name) for holder, name in self._places]
        values += self.read.values()
        for each in self.read.lists:
            values += [len(each), *islice(each, MOST_ITEMS)]
        return [
            *map(_comparable, values),
            *([environment()] if self.read.reads_environment else []),
            *(_held(names, held) for names, held in self._layers),
        ]


_Layer = tuple[Callable[[Any], Any], Mapping[str, Any]]
"""Reads some attributes of a layer at once; and all its attributes."""


def _is_layer(module: nn.Module) -> bool:
    return home_of(module).startswith("torch.nn.")


def _of_layer(module: nn.Module) -> _Layer:
    """The plain attributes of one of PyTorch's own layers, such as a rate or a stride."""
    held = vars(module)
    names = [
        name
        for name in held
        if name not in OF_MODULES and isinstance(held[name], (*PLAIN, tuple, type(None)))
    ]
    return itemgetter(*names) if names else len, held


def _held(names: Callable[[Any], Any], held: Mapping[str, Any]) -> Any:
    """These attributes and the number of all: an assigned `forward` hides that of the class."""
    try:
        return names(held), len(held)
    except KeyError:
        return None


def _of_module(module: nn.Module, *also: str) -> list[tuple[Mapping[str, Any], str]]:
    held = vars(module)
    return [(held, name) for name in ("forward", *also, *_fixed(held))]


def _fixed(held: Mapping[str, Any]) -> Iterator[str]:
    """Names of attributes that a graph may fix; `Reads` finds what code reads of containers."""
    for name, value in held.items():
        is_kept = callable(value) or isinstance(value, (*PLAIN, Tensor, *_ARRAYS))
        if is_kept and name not in OF_MODULES and name != "forward":
            yield name


class _Memory(NamedTuple):
    """A tensor's memory, the value that a kernel gets as an argument, and whether it trains."""

    tensor: _Same
    address: int
    value: Any
    trains: bool


class _Same:
    """Equal to another one of the same object only; keeps the object alive."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def _comparable(value: Any, depth: int = 2) -> Any:
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, _ARRAYS):
        return checksum(value)
    if isinstance(value, dict | list | tuple) and depth:
        items = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        some = islice(items, 2 * MOST_ITEMS)
        return type(value), len(value), [_comparable(item, depth - 1) for item in some]
    if not isinstance(value, Tensor):
        return _Same(value)
    if value.layout != torch.strided:
        return _Same(value)
    is_scalar = value.device.type == "cpu" and value.numel() == 1
    number = value.item() if is_scalar else None
    return _Memory(_Same(value), value.data_ptr(), number, value.requires_grad)
