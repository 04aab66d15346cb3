"""Materialises broadcast attention masks, which fused kernels reject."""

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
"""Position of `attn_mask` among the arguments of scaled dot product attention."""


class DenseMask(Transform):
    """Materialises attention masks that are broadcast along the key axis.

    On CUDA, PyTorch's fused attention kernels reject a mask whose last stride is not 1 ("all inputs
    must have a last dimension stride of 1"). PyTorch's fallback computes attention in float32 and
    writes the scores to memory. A mask that depends on the query alone has a last stride of 0. For
    encoders without padding, the transformers library creates an all-true mask of stride 0 under
    compilation or graph capture, but not in eager mode.
    """

    name = "dense_mask"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, inference, and a model that may pass a mask to attention."""
        return decide(
            no_cuda(facts),
            (workload.module is None, PLAIN_CALLABLE),
            (workload.is_training, "inference only"),
            (not may_mask(workload), "the model passes no mask to attention"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield a workload that materialises broadcast masks; there is nothing to undo."""
        yield workload.with_model(DenselyMasked(workload.model))


class DenselyMasked(nn.Module):
    """Runs a model with its broadcast attention masks materialised.

    Args:
        inner: the model.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner model with materialised masks; supports compilation and graph capture."""
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
    """Return the mask, copied only if its last stride is not 1; None stays None.

    Args:
        mask: shape (..., queries, keys). Broadcasting along other axes is preserved.
    """
    if mask is None or mask.dim() == 0 or mask.stride(-1) == 1 or mask.numel() == 0:
        return mask
    once = mask
    for axis, step in enumerate(mask.stride()[:-1]):
        if step == 0:
            once = once.narrow(axis, 0, 1)
    return once.clone(memory_format=torch.contiguous_format).expand(mask.shape)
