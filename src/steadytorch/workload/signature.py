"""Signatures of inputs: shapes, dtypes, strides and devices, as used in keys and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from steadytorch.errors import UsageError
from steadytorch.results.signature import Leaf, Signature
from steadytorch.workload.opened import opened, plainly_flat

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types that leaves of a call's arguments may have besides tensors."""
MOST_NESTINGS = 256
"""Maximum number of argument nestings whose description is cached."""
_nestings: dict[tuple[Any, ...], tuple[list[str], str]] = {}


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Applies `function` to each tensor in nested containers and returns the same structure.

    Common containers take a fast path that Dynamo can trace. The slower path, PyTorch's pytree,
    takes tens of microseconds for a few nested containers.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if tree is None or isinstance(tree, (bool, int, float, str, torch.Size)):
        return tree
    kind = type(tree)
    if kind is tuple:
        return tuple([map_tensors(function, item) for item in tree])
    if kind is list:
        return [map_tensors(function, item) for item in tree]
    if kind is dict:
        return {key: map_tensors(function, item) for key, item in tree.items()}
    return pytree.tree_map_only(torch.Tensor, function, opened(tree), is_leaf=is_size)


def is_size(value: Any) -> bool:
    """Whether a value is a `torch.Size`, which PyTorch's pytree would turn into a plain tuple."""
    return isinstance(value, torch.Size)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in a fixed order."""
    plain = plainly_flat(tree)
    leaves = pytree.tree_leaves(opened(tree)) if plain is None else plain[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions longer than 1; empty for tensors without elements or strides."""
    if tensor.layout != torch.strided or not tensor.numel():
        return ()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple([stride for size, stride in sizes if size > 1])


def in_order(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Sorts keyword arguments by name, their order in signatures, packages and engines."""
    return {name: kwargs[name] for name in sorted(kwargs)}


def signature(inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Signature:
    """The signature of a call.

    Args:
        inputs: positional arguments with any nesting.
        kwargs: keyword arguments; their order does not matter.

    Raises:
        UsageError: a leaf is neither a tensor nor a plain constant, so two calls could not be
            distinguished.
    """
    arguments = tuple(inputs), in_order(kwargs or {})
    plain = plainly_flat(arguments)
    if plain is None:
        structure = str(pytree.tree_structure(opened(arguments, caches=False)))
        return Signature(tuple(_leaf(*each) for each in named_leaves(arguments)), structure)
    leaves, nesting = plain
    known = _nestings.get(nesting)
    if known is None:
        if len(_nestings) >= MOST_NESTINGS:
            _nestings.clear()
        paths = [path for path, _ in named_leaves(arguments)]
        known = _nestings[nesting] = paths, str(pytree.tree_structure(arguments))
    paths, structure = known
    return Signature(tuple(map(_leaf, paths, leaves)), structure)


def named_leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[tuple[str, Any]]:
    """The leaves of a call's arguments with their paths, such as `[0]['mask']`."""
    tree = opened(arguments, caches=False)
    try:
        leaves = pytree.tree_leaves_with_path(tree)
    except ValueError:  # a class registered without names, as transformers registers its outputs
        return [(f"[{i}]", leaf) for i, leaf in enumerate(pytree.tree_leaves(tree))]
    return [(pytree.keystr(path[1:]), leaf) for path, leaf in leaves]


def _leaf(path: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        stride = tuple(value.stride()) if value.layout == torch.strided else ()
        dtype = str(value.dtype).removeprefix("torch.")
        return Leaf(path, tuple(value.shape), dtype, stride, value.device.type)
    if isinstance(value, CONSTANTS):
        return Leaf(path, constant=repr(value))
    raise UsageError(
        f"input {path or '()'} is a {type(value).__name__}: inputs may hold tensors, numbers, "
        "strings, booleans and None, nested in tuples, lists, dicts and dataclasses"
    )
