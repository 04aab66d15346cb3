"""From the arguments of a call to the key of what serves it, by what PyTorch hands out cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from steadytorch.workload.signature import CONSTANTS, Signature, signature, tensors_of

LAZY = "one of the inputs is to be negated or conjugated when it is read"
"""A view such as `z.conj()` or `z.conj().imag`: compiled code does not look at its bit."""
EXACT = frozenset({bool, int, str, type(None)})
"""Types whose values are equal only where their `repr` is: floats have two zeros."""


def quick_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A cheap stand-in for the signature: equal keys imply equal signatures and devices.

    Raises:
        Exception: these arguments have no signature.
    """
    try:
        key = [*map(_part, args), *map(_part, kwargs.values())]
    except _Other:
        return full_key(signature(args, kwargs), args, kwargs)
    return (*key, *kwargs) if kwargs else tuple(key)


class KeylessError(TypeError):
    """An argument is of a class that was found to have no signature before."""


class _Other(Exception):  # noqa: N818 - says that the long way is to be taken
    """An argument that is no plain tensor, constant or container."""


def _part(value: Any) -> Any:
    """The key of one argument, nested in plain lists, tuples and dictionaries."""
    kind = type(value)
    if kind is Tensor:
        if value.is_neg() or value.is_conj():
            raise TypeError(LAZY)
        return value.shape, value.stride(), value.dtype, value.device, value.layout
    if kind in EXACT:
        return kind, value
    if kind is float:  # two zeros, and NaN, which equals nothing
        return kind, value.hex()
    if kind is list or kind is tuple:
        return kind, tuple([_part(item) for item in value])
    if kind is dict:
        return kind, (*[(type(k), k) for k in value], *[_part(v) for v in value.values()])
    if kind in _without_signature:
        raise KeylessError(_without_signature[kind])
    raise _Other


def key_function(compiled: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """`quick_key`, or the same by compiled code where the arguments allow it.

    Args:
        compiled: what `native.host` has loaded; None for nothing.
    """
    if compiled is None:
        return quick_key
    of_tensors = compiled.key

    def key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = of_tensors(args, kwargs)
        return quick_key(args, kwargs) if found is None else found

    return key


_without_signature: WeakKeyDictionary[type, str] = WeakKeyDictionary()
"""Classes that arguments of no signature had, with what was said of them."""


def remember_keyless(args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str) -> None:
    """Has later calls with arguments of the same classes refused without a look at them.

    Args:
        args: positional arguments that have no signature.
        kwargs: keyword arguments.
        reason: why.
    """
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if not isinstance(value, (Tensor, *CONSTANTS)) and kind not in pytree.SUPPORTED_NODES:
            _without_signature[kind] = reason


def full_key(found: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The signature with the devices that it leaves out; the same for any order of keywords.

    Raises:
        TypeError: one of the tensors is sparse, or of a class of its own, which may mean anything
            (of parameters, freezing makes constants).
    """
    tensors = tensors_of((args, {name: kwargs[name] for name in sorted(kwargs)}))
    for tensor in tensors:
        if tensor.is_neg() or tensor.is_conj():
            raise TypeError(LAZY)
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            raise TypeError(f"one of the inputs is a {tensor.layout} {type(tensor).__name__}")
    return found, tuple([tensor.device for tensor in tensors])
