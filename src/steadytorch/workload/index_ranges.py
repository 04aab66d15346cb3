"""Ranges of the indices and divisors that PyTorch's operators take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


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


def uses(func: Any, args: tuple[Any, ...], found: Any) -> Iterator[tuple[Any, Range]]:
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
