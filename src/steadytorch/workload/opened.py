"""Lets PyTorch's pytree flatten containers of user classes, which it would treat as leaves."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_LEAVES = frozenset({torch.Tensor, nn.Parameter, float, int, bool, str, type(None)})
_STRING = frozenset({str})
_CACHES = frozenset({"Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin"})
"""Base classes of the key-value caches in Hugging Face transformers, and of cache layers."""
_NOT_PLAIN = object()


def opened(tree: Any, caches: bool = True) -> Any:
    """Replaces each container that pytree does not know by a node that pytree can flatten.

    Containers that are replaced are dataclasses, namespaces, subclasses of dict and list, and
    caches of Hugging Face transformers. Unflattening, as in `tree_map`, makes new containers of the
    same classes and keeps their other attributes. A tree of plain containers is returned unchanged.

    Args:
        tree: any value.
        caches: whether to open caches; False for arguments, because a model writes to its caches.
    """
    if _is_plain(tree):
        return tree
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda v: isinstance(v, torch.Size))
    kinds = [is_closed(leaf) or (caches and is_cache(leaf)) for leaf in leaves]
    if not any(kinds):
        return tree
    nodes = [Opened(v, caches) if closed else v for v, closed in zip(leaves, kinds, strict=True)]
    return pytree.tree_unflatten(nodes, structure)


def tensors_in_caches(tree: Any) -> set[int]:
    """Ids of the tensors in Hugging Face transformers caches within a result."""
    found: set[int] = set()
    for leaf in pytree.tree_leaves(opened(tree, caches=False)):
        if is_cache(leaf):
            found.update(map(id, pytree.tree_leaves(opened(leaf))))
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value has only plain containers and leaves; 10 times as fast as flattening it."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value.values()))
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    return kind in _LEAVES


def plainly_flat(value: Any) -> tuple[list[Any], tuple[Any, ...]] | None:
    """Flattens plain containers to their leaves and nesting, 5 times as fast as pytree.

    Returns:
        The leaves in pytree's order, and a value that is equal only for equal nestings. None if
        there are other containers or leaves, or keys that are not strings.
    """
    leaves: list[Any] = []
    nesting: list[Any] = []
    return (leaves, tuple(nesting)) if _flatten_plain(value, leaves, nesting) else None


def _flatten_plain(value: Any, leaves: list[Any], nesting: list[Any]) -> bool:
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        nesting.append(None)
        return True
    if kind is dict:
        nesting += dict, len(value), *value
        items = value.values() if _STRING.issuperset(map(type, value)) else (_NOT_PLAIN,)
    elif kind is tuple or kind is list:
        nesting += kind, len(value)
        items = value
    else:
        return False
    for item in items:  # noqa: SIM110 - a generator would add a frame for each container
        if not _flatten_plain(item, leaves, nesting):
            return False
    return True


def is_closed(value: Any) -> bool:
    """Whether a value is a container of a class that pytree does not know."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES:
        return False
    return isinstance(value, (dict, list, SimpleNamespace)) or is_dataclass(kind)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of Hugging Face transformers, or a layer of a cache."""
    # Not remembered: Dynamo would warn of an `lru_cache`.
    return any(
        base.__name__ in _CACHES and base.__module__ == "transformers.cache_utils"
        for base in type(value).__mro__
    )


class Opened:
    """A container of a user class, wrapped as a node that pytree can flatten; see `opened`.

    Args:
        value: the container.
        caches: whether caches in the container are opened too.
    """

    def __init__(self, value: Any, caches: bool = True) -> None:
        self.value, self.caches = value, caches


class _Form:
    """The form from which pytree rebuilds a flattened container.

    Two forms are equal if their classes, fields and keys are, as for containers that pytree knows.

    Args:
        template: an empty copy of the container.
        names: names of the container's fields.
        keys: the container's keys, or the positions of its items.
    """

    def __init__(self, template: Any, names: tuple[str, ...], keys: tuple[Any, ...]) -> None:
        self.template, self.names, self.keys = template, names, keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        kind = type(self.template)
        return f"{kind.__module__}.{kind.__qualname__}{(*self.names, *self.keys)}"

    def _parts(self) -> tuple[Any, ...]:
        return type(self.template), self.names, self.keys


def _flatten(node: Opened) -> tuple[list[Any], _Form]:
    value: Any = node.value
    keys: tuple[Any, ...] = ()
    if isinstance(value, (dict, list)):
        keys = tuple(value if isinstance(value, dict) else range(len(value)))
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    if isinstance(value, SimpleNamespace):
        names = [*vars(value)]
    if is_cache(value):  # its settings stay with the template
        names = [name for name, held in vars(value).items() if _may_hold_tensors(held)]
    # A dataclass that is a dict too, as in transformers, holds its items twice.
    names = [name for name in names if name not in keys and hasattr(value, name)]
    held = [getattr(value, name) for name in names] + [node.value[key] for key in keys]
    form = _Form(copy.copy(node.value), tuple(names), keys)
    _fill(form, form.template, [None] * len(held))  # a form may outlive the tensors
    return [opened(part, node.caches) for part in held], form


def _may_hold_tensors(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple, dict)) or is_cache(value)


def _unflatten(parts: Iterable[Any], form: _Form) -> Any:
    made = copy.copy(form.template)
    _fill(form, made, list(parts))
    return made


def _fill(form: _Form, made: Any, parts: list[Any]) -> None:
    count, keeps_twice = len(form.names), is_dataclass(made)
    attributes = list(zip(form.names, parts[:count], strict=True))
    store: Any = dict.__setitem__ if isinstance(made, dict) else list.__setitem__
    for key, part in zip(form.keys, parts[count:], strict=True):
        store(made, key, part)
        if keeps_twice and hasattr(made, str(key)):
            attributes.append((key, part))
    for name, part in attributes:
        object.__setattr__(made, name, part)  # a dataclass may be frozen


def _flatten_with_keys(node: Opened) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Form]:
    parts, form = _flatten(node)
    names = [*map(pytree.GetAttrKey, form.names), *map(pytree.MappingKey, form.keys)]
    return list(zip(names, parts, strict=True)), form


pytree.register_pytree_node(Opened, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
