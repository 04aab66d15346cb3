"""Copies the containers in a call's arguments, and detects writes to the copies."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError
from steadytorch.workload.opened import opened
from steadytorch.workload.signature import CONSTANTS

Convert = Callable[[torch.Tensor], torch.Tensor]

_DICTIONARIES = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_FLAT = (torch.Tensor, *CONSTANTS)


def holds_containers(values: Iterable[Any]) -> bool:
    """Whether arguments hold a container that a call could write to, even inside tuples."""
    for value in values:
        if isinstance(value, tuple):
            if holds_containers(value):
                return True
        elif not isinstance(value, _FLAT):
            return True
    return False


class BorrowedArguments:
    """Arguments with copied containers, so that a call's writes do not reach the originals.

    Tensors are not copied, only converted if `convert` is given. Lists, deques and dictionaries are
    copied. Other containers that PyTorch's pytree can flatten are rebuilt; writes to rebuilt
    containers cannot be applied to the originals.

    Args:
        arguments: arguments with any nesting.
        convert: converts each tensor; None to share the tensors.

    Attributes:
        arguments: the arguments with copied containers.
    """

    def __init__(self, arguments: Any, convert: Convert | None = None) -> None:
        self._convert = convert
        self._copied: list[tuple[Any, Any, list[Any]]] = []
        self._rebuilt: list[tuple[Any, list[Any], Any]] = []
        self._originals: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._copies: dict[int, Any] = {}
        self.arguments = self._copy(arguments)

    def is_written(self) -> bool:
        """Whether a call changed the items of a container."""
        return self._is_rebuilt_written() or any(
            not _same(_items(copy), before) for _, copy, before in self._copied
        )

    def give_back(self, result: Any = None, convert: Convert | None = None) -> Any:
        """Applies a call's writes from the copied containers to the original containers.

        Args:
            result: result of the call.
            convert: converts each tensor that the call returned or stored; None for no conversion.

        Returns:
            The result, with copied containers and converted tensors replaced by their originals.

        Raises:
            UnsupportedError: the call wrote to a container of a custom class; no writes were
                applied.
        """
        if self._is_rebuilt_written():
            raise UnsupportedError("the model writes to a container of a custom class")
        for original, copy, before in self._copied:
            if not _same(_items(copy), before):
                _refill(original, [self._restored(item, convert) for item in _items(copy)])
        return self._restored(result, convert)

    def _is_rebuilt_written(self) -> bool:
        for copy, leaves, structure in self._rebuilt:
            now, structure_now = pytree.tree_flatten(opened(copy))
            if structure_now != structure or not _same(now, leaves):
                return True
        return False

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return value if self._convert is None else self._known(value, self._convert)
        if isinstance(value, CONSTANTS):
            return value
        if isinstance(value, tuple):
            items = [self._copy(item) for item in value]
            return value if _same(items, value) else _tuple_of(value, items)
        if id(value) in self._copies:
            return self._copies[id(value)]
        if kind in _SEQUENCES or kind in _DICTIONARIES:
            made = value.copy()
            self._remember(value, made)
            _refill(made, [self._copy(item) for item in _items(value)])
            self._copied.append((value, made, _items(made)))
            return made
        leaves, structure = pytree.tree_flatten(opened(value))
        if structure.is_leaf():
            return value
        made = pytree.tree_unflatten([self._copy(leaf) for leaf in leaves], structure)
        if made is not value:
            self._remember(value, made)
            self._rebuilt.append((made, *pytree.tree_flatten(opened(made))))
        return made

    def _known(self, tensor: torch.Tensor, convert: Convert) -> torch.Tensor:
        if id(tensor) not in self._copies:
            self._remember(tensor, convert(tensor))
        return self._copies[id(tensor)]

    def _remember(self, original: Any, made: Any) -> None:
        self._copies[id(original)] = made
        self._originals[id(made)] = original
        self._alive += [original, made]

    def _restored(self, value: Any, convert: Convert | None) -> Any:
        """A value with copied containers and converted tensors replaced by their originals."""
        if id(value) in self._originals:
            return self._originals[id(value)]
        if isinstance(value, torch.Tensor):
            if convert is None:
                return value
            made = self._originals[id(value)] = convert(value)
            self._alive.append(value)
            return made
        if isinstance(value, tuple):
            items = [self._restored(item, convert) for item in value]
            return value if _same(items, value) else _tuple_of(value, items)
        if type(value) in _SEQUENCES or type(value) in _DICTIONARIES:
            items = [self._restored(item, convert) for item in _items(value)]
            if not _same(items, _items(value)):
                _refill(value, items)
            return value
        leaves, structure = pytree.tree_flatten(opened(value))
        if structure.is_leaf():
            return value
        items = [self._restored(leaf, convert) for leaf in leaves]
        return value if _same(items, leaves) else pytree.tree_unflatten(items, structure)


def _items(container: Any) -> list[Any]:
    """Items of a sequence, or alternating keys and values of a dictionary."""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _refill(container: Any, items: list[Any]) -> None:
    if isinstance(container, dict):
        pairs = dict(zip(items[::2], items[1::2], strict=True))
        container.clear()
        container.update(pairs)
    elif isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.extend(items)


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    now, before = list(now), list(before)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _tuple_of(like: tuple[Any, ...], items: list[Any]) -> Any:
    make = getattr(like, "_make", None)
    return type(like)(items) if make is None else make(items)
