"""Leaves the conversion of a model's 16-bit output to the compiled loss that reads it.

A conversion of its own reads and writes all logits once more, and their gradients as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


class NarrowOutput:
    """What a model under autocast tells the loss about its output.

    Attributes:
        dtype: the dtype that the loss must convert the output to; None to take it as it is.
    """

    dtype: torch.dtype | None = None


_taker: ContextVar[NarrowOutput | None] = ContextVar("taker", default=None)


@contextmanager
def narrow_output(allowed: bool) -> Iterator[NarrowOutput]:
    """Inside the `with` block, a model under autocast may return its output in 16 bits.

    Args:
        allowed: whether it may; False has all outputs converted, also within such a block.
    """
    taker = NarrowOutput()
    token = _taker.set(taker if allowed else None)
    try:
        yield taker
    finally:
        _taker.reset(token)


def is_asked() -> bool:
    """Whether the call is inside a block that allows 16-bit outputs."""
    return _taker.get() is not None


def left_narrow(output: object, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether an output stays in 16 bits, because the loss converts it.

    Args:
        output: what the model returned; only a tensor of dtype `narrow` is left to the loss.
        narrow: the dtype of autocast.
        wide: the dtype that the loss is to convert it to.
    """
    taker = _taker.get()
    if taker is None or type(output) is not torch.Tensor or output.dtype != narrow:
        return False
    taker.dtype = wide
    return True
