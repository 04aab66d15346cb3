"""Finds which inputs of a call are indices or divisors, and the range that they must lie in.

PyTorch raises an exception for an index out of range, and for an integer divided by 0. Compiled
code on a CPU ends the process, and other engines return something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_COPIES = (
    aten.clone.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.constant_pad_nd.default,  # labels of language models, shifted
    aten.roll.default,
    aten.flip.default,
)


class Range(NamedTuple):
    """The integers from `low` to below `high`, and `other`, such as a loss's `ignore_index`."""

    low: int
    high: int
    other: int | None = None

    def excludes(self, tensor: Tensor) -> bool:
        """Whether a tensor on the CPU has an element out of the range."""
        if not tensor.numel():
            return False
        least, most = (bound.item() for bound in tensor.aminmax())
        if self.low <= least and most < self.high:
            return False
        if self.other is None:
            return True
        within = (tensor >= self.low) & (tensor < self.high) | (tensor == self.other)
        return not bool(within.all())

    def within(self, other: Range) -> Range:
        """The range that lies in both."""
        exception = self.other if self.other == other.other else None
        return Range(max(self.low, other.low), min(self.high, other.high), exception)


_POSITIVE = Range(1, 1 << 63)


def may_be_index(value: Any) -> bool:
    """Whether a value is an integer tensor on the CPU."""
    is_integer = isinstance(value, Tensor) and value.dtype in _INTEGERS
    return is_integer and value.device.type == "cpu"


def index_ranges(call: Callable[[], Any], tensors: Sequence[Any]) -> dict[int, Range]:
    """Runs a call and returns the ranges of those tensors that it uses as indices or divisors.

    Args:
        call: runs PyTorch operators on the tensors; they may be fake tensors.
        tensors: those to follow, through views, copies and conversions only.

    Returns:
        The ranges by place in `tensors`, of integer tensors on the CPU.
    """
    recorder = _Recorder(tensors)
    if recorder.follows:
        with recorder, torch.no_grad():
            call()
    return recorder.found


class _Recorder(TorchDispatchMode):
    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self.found: dict[int, Range] = {}
        # Keeps the tensors alive, so that no id is used twice.
        self._places: dict[int, tuple[Tensor, int]] = {
            id(tensor): (tensor, place)
            for place, tensor in enumerate(tensors)
            if may_be_index(tensor)
        }

    @property
    def follows(self) -> bool:
        return bool(self._places)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for index, allowed in _indices(func, args, found):
            if id(index) in self._places:
                place = self._places[id(index)][1]
                self.found[place] = allowed.within(self.found.get(place, allowed))
        if args and id(args[0]) in self._places and (func.is_view or func in _COPIES):
            place = self._places[id(args[0])][1]
            for each in found if isinstance(found, list | tuple) else (found,):
                if isinstance(each, Tensor) and each.dtype in _INTEGERS:
                    self._places[id(each)] = each, place
        return found


def _indices(func: Any, args: tuple[Any, ...], found: Any) -> Iterator[tuple[Any, Range]]:
    """The arguments of an operator that are indices or divisors, each with its range."""
    name = func.overloadpacket
    if name in _ROWS:
        yield args[1], Range(0, args[0].size(0))
    elif name in _ALONG:
        size = args[0].size(args[1]) if args[0].dim() else 1
        yield args[2], Range(0, size)
    elif name in _ANYWHERE:
        yield from _of_each_dimension(args[0], args[1])
    elif name is aten.take:
        yield args[1], Range(-args[0].numel(), args[0].numel())
    elif name in _DIVISIONS and not found.is_floating_point():
        yield args[1], _POSITIVE  # models divide by counts and lengths
    elif name in _LOSSES:
        yield args[1], Range(0, args[0].size(1 if args[0].dim() > 1 else 0), args[4])


def _of_each_dimension(of: Tensor, indices: Sequence[Any]) -> Iterator[tuple[Any, Range]]:
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):  # a mask
            dim += index.dim()
            continue
        if index is not None:
            yield index, Range(-of.size(dim), of.size(dim))
        dim += 1


_ROWS = (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only)
_ALONG = (
    aten.gather,
    aten.index_select,
    aten.index_add,
    aten.index_add_,
    aten.index_copy,
    aten.index_copy_,
    aten.index_fill,
    aten.index_fill_,
    aten.scatter,
    aten.scatter_,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
)
_ANYWHERE = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)
_DIVISIONS = (aten.div, aten.floor_divide, aten.remainder, aten.fmod)
_LOSSES = (aten.nll_loss_forward, aten.nll_loss2d_forward)


def checked(call: Callable[..., Any], ranges: Mapping[int, Range]) -> Callable[..., Any]:
    """The call of flat tensors, which raises IndexError if one is out of its range."""
    if not ranges:
        return call

    def check(*tensors: Tensor) -> Any:
        for place, allowed in ranges.items():
            if allowed.excludes(tensors[place]):
                raise IndexError("index out of range")
        return call(*tensors)

    return check
