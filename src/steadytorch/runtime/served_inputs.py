"""Keeps inputs from executors that may treat them otherwise than the model does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from steadytorch.workload.index_ranges import Range
from steadytorch.workload.indices import Indices
from steadytorch.workload.signature import tensors_of

NOT_FINITE = "an input has NaN or infinities"
WIDE = "an integer input exceeds 2^24"
OUT_OF_RANGE = "an index or a divisor in the inputs is out of range"
OUT_OF_RANGE_OR_WIDE = "an index or a divisor is out of range, or an integer exceeds 2^24"
EXACT = Range(-(1 << 24), (1 << 24) + 1)
"""Integers that float32 holds exactly."""


class NotServedError(Exception):
    """Raised instead of a call that the executor must not serve; its message is the reason."""


class Test(NamedTuple):
    """A test of the tensors of a call.

    Attributes:
        fails: whether the executor must not serve them.
        reason: what is wrong then.
    """

    fails: Callable[[Sequence[Any]], bool]
    reason: str


class Guarded:
    """A call that raises `NotServedError` for inputs that fail a test.

    Args:
        call: what to wrap.
        args: positional arguments of its calls.
        kwargs: keyword arguments of its calls.
        tests: of their tensors.
    """

    __slots__ = ("_call", "_is_flat", "_tests")

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tests: Sequence[Test],
    ) -> None:
        self._call, self._tests = call, tuple(tests)
        self._is_flat = not kwargs and all(isinstance(each, torch.Tensor) for each in args)

    def refuses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why a call with these arguments would raise `NotServedError`; None if it would not."""
        tensors = args if self._is_flat else tensors_of((args, kwargs))
        for fails, reason in self._tests:
            if fails(tensors):
                return reason
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls, unless an input fails a test."""
        if (reason := self.refuses(args, kwargs)) is not None:
            raise NotServedError(reason)
        return self._call(*args, **kwargs)


def are_finite(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Test]:
    """Tests of floating-point inputs on the CPU for NaN and infinities.

    Each input is summed: 9 us for 1x3x224x224 float32 on two cores, where a test of each element
    takes 190 us. A sum that overflows counts as infinite. An input that has infinities here, or
    numbers whose sum overflows, may have them later, such as a mask, but never NaN.
    """
    return [
        Test(partial(_fails_at, place, _test(tensor)), NOT_FINITE)
        for place, tensor in enumerate(tensors_of((args, dict(kwargs))))
        if tensor.is_floating_point() and tensor.is_cpu
    ]


def are_narrow(args: tuple[Any, ...], kwargs: Mapping[str, Any], indices: Indices) -> list[Test]:
    """Tests of integer inputs on the CPU for integers that float32 does not hold; 3 us each.

    Inputs whose range as `indices` is narrower have a test already.
    """
    tested = {n for n, allowed in indices.given.items() if EXACT.contains(allowed)}
    return [
        Test(partial(_fails_at, place, EXACT.excludes), WIDE)
        for place, tensor in enumerate(tensors_of((args, dict(kwargs))))
        if tensor.dtype in (torch.int64, torch.int32) and tensor.is_cpu and place not in tested
    ]


def are_in_range(indices: Indices) -> list[Test]:
    """Tests of indices, divisors and other integers of a call, if it has any with a range."""
    reason = OUT_OF_RANGE if indices.within is None else OUT_OF_RANGE_OR_WIDE
    return [Test(indices.out_of_range, reason)] if indices else []


def _fails_at(place: int, fails: Callable[[torch.Tensor], bool], tensors: Sequence[Any]) -> bool:
    return fails(tensors[place])


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
