"""Ranges of the indices and divisors that PyTorch's operators take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Range(NamedTuple):
    """The integers from `low` to below `high`, and `other`, such as a loss's `ignore_index`.

    Divisors may be any number but 0.
    """

    low: int
    high: int
    other: int | None = None
    divides: bool = False

    def excludes(self, tensor: Tensor) -> bool:
        """Whether a tensor on the CPU has an element out of the range."""
        if not tensor.numel():
            return False
        least, most = (bound.item() for bound in tensor.aminmax())
        if self.divides and least <= 0 <= most and not bool(tensor.all()):
            return True
        if self.low <= least and most < self.high:
            return False
        if self.other is None:
            return True
        within = (tensor >= self.low) & (tensor < self.high) | (tensor == self.other)
        return not bool(within.all())

    def within(self, other: Range) -> Range:
        """The range that lies in both."""
        exception = self.other if self.other == other.other else None
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Range(low, high, exception, self.divides or other.divides)

    def contains(self, other: Range) -> bool:
        """Whether all integers of another range without exceptions lie within this one."""
        return self.low <= other.low and other.high <= self.high and not self.divides


_NOT_ZERO = Range(-(1 << 63), 1 << 63, divides=True)


def uses(func: Any, args: tuple[Any, ...], found: Any) -> Iterator[tuple[Any, Range]]:
    """The arguments of an operator that are indices or divisors, each with its range."""
    name = func.overloadpacket
    if name in _ROWS:
        yield args[1], Range(0, args[0].size(0))
    elif name in _ALONG:
        size = args[0].size(args[1]) if args[0].dim() else 1
        yield args[2], Range(0, size)
    elif name in _FILLS:
        size = args[0].size(args[1]) if args[0].dim() else 1
        yield args[2], Range(-size, size)
    elif name in _ANYWHERE:
        yield from _of_each_dimension(args[0], args[1])
    elif name in (aten.take, aten.put, aten.put_):
        yield args[1], Range(-args[0].numel(), args[0].numel())
    elif name in _DIVISIONS and not found.is_floating_point():
        yield args[1], _NOT_ZERO
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
    aten.index_reduce,
    aten.index_reduce_,
    aten.scatter,
    aten.scatter_,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
)
_FILLS = (aten.index_fill, aten.index_fill_)
_ANYWHERE = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)
_DIVISIONS = (
    aten.div,
    aten.div_,
    aten.floor_divide,
    aten.floor_divide_,
    aten.remainder,
    aten.remainder_,
    aten.fmod,
    aten.fmod_,
)
_LOSSES = (aten.nll_loss_forward, aten.nll_loss2d_forward)
