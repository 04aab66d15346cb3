"""Keeps inputs with NaN or infinities from executors that may turn these into ordinary numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from steadytorch.workload.signature import tensors_of

NOT_FINITE = "an input has NaN or infinities"


class NotFiniteError(Exception):
    """Raised instead of a call whose inputs have NaN or infinities."""


def only_finite(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """An `OnlyFinite` call, or the call itself if no input can have NaN or infinities."""
    guarded = OnlyFinite(call, args, kwargs)
    return guarded if guarded.watches else call


class OnlyFinite:
    """A call that raises `NotFiniteError` for NaN or infinities in inputs on the CPU.

    Sums each floating-point input: 9 us for 1x3x224x224 float32 on two cores, where a test of each
    element takes 190 us. A sum that overflows counts as infinite.

    Args:
        call: what to wrap.
        args: positional arguments of its calls. An input that has infinities here, or numbers whose
            sum overflows, may have them later, such as a mask, but never NaN.
        kwargs: keyword arguments of its calls.
    """

    __slots__ = ("_call", "_is_flat", "_tests")

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._call = call
        self._is_flat = not kwargs and all(isinstance(each, torch.Tensor) for each in args)
        self._tests = [
            (place, _test(tensor))
            for place, tensor in enumerate(tensors_of((args, dict(kwargs))))
            if tensor.is_floating_point() and tensor.is_cpu
        ]

    @property
    def watches(self) -> bool:
        """Whether any input is summed."""
        return bool(self._tests)

    def refuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments would raise `NotFiniteError`."""
        tensors = args if self._is_flat else tensors_of((args, kwargs))
        return any([fails(tensors[place]) for place, fails in self._tests])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls, unless an input is not finite."""
        if self.refuses(args, kwargs):
            raise NotFiniteError(NOT_FINITE)
        return self._call(*args, **kwargs)


def _test(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """The test for inputs like this one."""
    if tensor.itemsize == 1:  # PyTorch does not sum 8 bits
        return _has_nan
    fails = _sum_is_not_finite if tensor.itemsize >= 4 else _long_sum_is_not_finite
    return _has_nan if fails(tensor) and not _has_nan(tensor) else fails


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().any())


def _sum_is_not_finite(tensor: torch.Tensor) -> bool:
    return not math.isfinite(tensor.sum().item())


def _long_sum_is_not_finite(tensor: torch.Tensor) -> bool:
    # A sum in 16 bits soon overflows.
    return not math.isfinite(tensor.sum(dtype=torch.float32).item())
