"""Converts the tensors in a model's arguments and outputs, with code that Dynamo can trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from steadytorch.workload.containers import BorrowedArguments, Convert, holds_containers
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

HalfName = Literal["bf16", "fp16"]
HALF_TYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Converting(nn.Module):
    """A wrapper that converts the arguments of a model at every call; callers pass original inputs.

    If the inner model writes to a list or dict argument, the new values are converted back and
    stored in the caller's object.

    Args:
        inner: the model.
        convert: converts each tensor argument.
        back: converts each tensor that the model returns or writes to a container.
    """

    def __init__(self, inner: nn.Module, convert: Convert, back: Convert | None = None) -> None:
        super().__init__()
        self.inner, self.convert, self.back = inner, convert, back
        self.training = inner.training
        self._lend: Callable[..., Any] = BorrowedArguments
        self._give_back: Callable[..., Any] = BorrowedArguments.give_back

    def lend_uncompiled(self) -> None:
        """Hide containers (lists and dicts) among the arguments from torch.compile.

        Containers are tracked by object identity, and guards on identity would recompile at every
        call.
        """
        self._lend = torch.compiler.disable(BorrowedArguments)
        self._give_back = torch.compiler.disable(BorrowedArguments.give_back)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner model on the converted arguments."""
        if holds_containers((*args, *kwargs.values())):
            borrowed = self._lend((args, kwargs), self.convert)
            return self._give_back(borrowed, _called(self.inner, borrowed.arguments), self.back)
        result = _called(self.inner, map_tensors(self.convert, (args, kwargs)))
        return result if self.back is None else map_tensors(self.back, result)


def _called(model: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return model(*args, **kwargs)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert the dtype of a tensor; keep its strides, even if elements overlap or leave gaps."""
    return _as_strided(tensor.to(dtype), tensor)


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor and keep its strides, even if its elements overlap or leave gaps in memory."""
    return _as_strided(tensor.clone(), tensor)


def restrided(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the given strides, even if these make elements overlap or leave gaps.

    Args:
        values: the tensor.
        strides: in elements, one per dimension.
    """
    like = torch.empty_strided(values.shape, strides, dtype=values.dtype, device="meta")
    return _as_strided(values, like)


def _as_strided(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `values` with the strides of `like`, copied only if the strides differ."""
    if like.layout != torch.strided or values.stride() == like.stride():
        return values
    # Store an expanded dimension once.
    narrow, base = values, like
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and like.shape[dim] > 1:
            narrow, base = narrow.narrow(dim, 0, 1), base.narrow(dim, 0, 1)
    made = torch.empty_strided(base.shape, base.stride(), dtype=values.dtype, device=values.device)
    return made.copy_(narrow).expand(like.shape)


def own_dtype(workload: Workload) -> torch.dtype:
    """Return the dtype of the untouched workload, before any transform."""
    return replace(workload, model=workload.untouched).dtype


def own_device(workload: Workload) -> torch.device:
    """Return the device of the untouched workload, before any transform."""
    return replace(workload, model=workload.untouched).device
