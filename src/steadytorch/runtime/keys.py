"""From the arguments of a call to the key of what serves it, by what PyTorch hands out cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadytorch.workload.signature import Signature, signature, tensors_of

EXACT = frozenset({bool, int, str, type(None)})
"""Types whose values are equal only where their `repr` is: floats have two zeros."""


def quick_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A cheap stand-in for the signature: equal keys imply equal signatures and devices.

    Raises:
        Exception: these arguments have no signature.
    """
    if len(args) == 1 and not kwargs:
        a = args[0]
        if type(a) is Tensor:
            return a.shape, a.stride(), a.dtype, a.device, a.layout
    key = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is Tensor:
            key.append((a.shape, a.stride(), a.dtype, a.device, a.layout))
        elif kind in EXACT:
            key.append((kind, a))
        else:
            return full_key(signature(args, kwargs), args, kwargs)
    return (*key, *kwargs) if kwargs else tuple(key)


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


def full_key(found: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The signature with the devices that it leaves out; the same for any order of keywords.

    Raises:
        TypeError: one of the tensors is sparse, or of a class of its own, which may mean anything
            (of parameters, freezing makes constants).
    """
    tensors = tensors_of((args, {name: kwargs[name] for name in sorted(kwargs)}))
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            raise TypeError(f"one of the inputs is a {tensor.layout} {type(tensor).__name__}")
    return found, tuple([tensor.device for tensor in tensors])
