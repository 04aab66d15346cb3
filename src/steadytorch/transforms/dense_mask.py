"""Writes out masks of attention that are spread over the keys, which fused kernels refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import PLAIN_CALLABLE, decide, may_mask, no_cuda
from steadytorch.workload.workload import Workload

_MASK = 3
"""The place of `attn_mask` among the arguments of scaled dot product attention."""


class DenseMask(Transform):
    """Masks of attention with their last axis in memory, where they were one value spread over it.

    On CUDA PyTorch's fused implementations refuse a mask whose last stride is not 1, in their own
    words "all inputs must have a last dimension stride of 1", and what remains computes in float32,
    its scores written to memory. Such a mask is easily made: one that depends on the query alone
    has stride 0 there. transformers makes it, all true, for encoders without padding wherever a
    model is compiled or recorded, though not where it runs as it is.
    """

    name = "dense_mask"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, inference, and a model that may give its attention a mask."""
        return decide(
            no_cuda(facts),
            (workload.module is None, PLAIN_CALLABLE),
            (workload.is_training, "for inference"),
            (not may_mask(workload), "the model gives its attention no mask"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields a workload whose attention gets such masks written out; nothing to undo."""
        yield workload.with_model(DenselyMasked(workload.model))


class DenselyMasked(nn.Module):
    """A model within the mode that writes out masks.

    Args:
        inner: the model.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the inner model, which may be compiled or recorded along with the mode."""
        with _DenseMasks():
            return self.inner(*args, **kwargs)


class _DenseMasks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if len(args) > _MASK:
                args = (*args[:_MASK], dense(args[_MASK]), *args[_MASK + 1 :])
            elif "attn_mask" in kwargs:
                kwargs = {**kwargs, "attn_mask": dense(kwargs["attn_mask"])}
        return func(*args, **kwargs)


def dense(mask: Tensor | None) -> Tensor | None:
    """The mask with its last axis in memory; as it is where that has stride 1, or there is none.

    Args:
        mask: shape (..., queries, keys). What it is spread over along other axes stays so.
    """
    if mask is None or mask.dim() == 0 or mask.stride(-1) == 1 or mask.numel() == 0:
        return mask
    once = mask
    for axis, step in enumerate(mask.stride()[:-1]):
        if step == 0:
            once = once.narrow(axis, 0, 1)
    return once.clone(memory_format=torch.contiguous_format).expand(mask.shape)
