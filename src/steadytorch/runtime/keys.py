"""Computes dictionary keys from call arguments, using tensor attributes that are cheap to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from steadytorch.errors import one_line
from steadytorch.results.signature import Signature
from steadytorch.workload.opened import is_closed
from steadytorch.workload.signature import CONSTANTS, signature, tensors_of

EXACT = frozenset({bool, int, str, type(None)})
"""Types whose equal values have equal `repr`; not float, where 0.0 == -0.0."""

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_STRIDED = torch.strided
_STRING = {str}


def quick_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Computes a fast key of call arguments: equal keys imply equal signatures and devices.

    Raises:
        Exception: these arguments have no signature.
    """
    key: list[Any] = []
    _add(key, args)
    if kwargs:
        _add(key, kwargs.values())
        key += kwargs
    return tuple(key)


def _add(key: list[Any], values: Iterable[Any]) -> None:
    """Appends arguments to a flat key, with types and lengths so that keys are unambiguous."""
    for a in values:
        kind = type(a)
        if kind is Tensor:
            dtype = a.dtype
            if a.layout is not _STRIDED or a.is_neg() or a._is_zerotensor():
                raise TypeError(f"one of the inputs is {_oddity(a)}")
            if dtype in _COMPLEX and a.is_conj():
                raise TypeError(f"one of the inputs is {_oddity(a)}")
            key += a.shape, a.stride(), dtype, a.device
        elif kind in EXACT:
            key += kind, a
        elif kind is float:
            key += kind, repr(a)
        elif kind is list or kind is tuple:
            key += kind, len(a)
            _add(key, a)
        elif kind is dict and _STRING.issuperset(map(type, a)):
            key += kind, len(a), *a
            _add(key, a.values())
        else:
            _add_odd(key, a)


def _add_odd(key: list[Any], a: Any) -> None:
    if _is_container(a):
        key.append(full_key(signature((a,)), (a,), {}))
    elif isinstance(a, CONSTANTS):
        key += type(a), repr(a)
    else:  # `why_no_key` gives details, 100 times as slowly
        raise TypeError(f"one of the inputs is {_oddity(a)}")


def _is_container(a: Any) -> bool:
    """Whether signatures support this type of container, such as a tuple, dict or dataclass."""
    return type(a) in pytree.SUPPORTED_NODES or isinstance(a, tuple) or is_closed(a)


def key_function(compiled: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """Returns `quick_key`, or a compiled key function that falls back to `quick_key`.

    Args:
        compiled: the module loaded by `native.host`, or None.
    """
    if compiled is None:
        return quick_key
    of_plain = compiled.key

    def key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = of_plain(args, kwargs)
        return quick_key(args, kwargs) if found is None else found

    return key


def why_no_key(error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns why call arguments have no key, with the argument's position if known.

    Args:
        error: the exception raised by `quick_key`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    try:
        full_key(signature(args, kwargs), args, kwargs)
    except Exception as found:
        return one_line(found)
    return one_line(error)


def full_key(found: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Combines the signature of a call with the devices of its tensors; ignores keyword order.

    Raises:
        TypeError: a tensor is sparse, belongs to a subclass, or does not hold its values in memory.
            `nn.Parameter` counts as a subclass, because freezing makes constants of parameters.
    """
    tensors = tensors_of((args, {name: kwargs[name] for name in sorted(kwargs)}))
    for tensor in tensors:
        if oddity := _oddity(tensor):
            raise TypeError(f"one of the inputs is {oddity}")
    return found, tuple([tensor.device for tensor in tensors])


def needs_gradient(values: Iterable[Any]) -> bool:
    """Whether any tensor in these arguments requires a gradient, at any nesting depth."""
    for a in values:
        kind = type(a)
        if kind is Tensor:
            found = a.requires_grad
        elif kind is list or kind is tuple:
            found = needs_gradient(a)
        elif kind is dict:
            found = needs_gradient(a.values())
        else:
            found = kind not in EXACT and _odd_needs_gradient(a)
        if found:
            return True
    return False


def _odd_needs_gradient(a: Any) -> bool:
    if isinstance(a, Tensor):
        return a.requires_grad
    return _is_container(a) and any(t.requires_grad for t in tensors_of(a))


def _oddity(a: Any) -> str:
    """Describes why no key can be computed from a value; empty for plain tensors."""
    if type(a) is not Tensor or a.layout is not _STRIDED:
        layout = f"{a.layout} " if isinstance(a, Tensor) else ""
        return f"a {layout}{type(a).__name__}"
    if a.is_conj():
        return "conjugated lazily: call resolve_conj()"
    if a.is_neg():
        return "negated lazily: call resolve_neg()"
    return "zero without memory: clone it" if a._is_zerotensor() else ""
