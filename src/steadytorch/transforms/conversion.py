"""Conversion of the tensors in arguments and outputs: cheap, and transparent to Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

Convert = Callable[[torch.Tensor], torch.Tensor]

HalfName = Literal["bf16", "fp16"]
HALF_TYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Converting(nn.Module):
    """A model whose arguments are converted at every call: callers pass the original inputs.

    Args:
        inner: the model.
        convert: takes and returns a tensor.
    """

    def __init__(self, inner: nn.Module, convert: Convert) -> None:
        super().__init__()
        self.inner, self.convert = inner, convert
        self.training = inner.training

    def converted(self, arguments: Any) -> Any:
        """What the inner model is called with: tensors in containers, nested at will."""
        return map_tensors(self.convert, arguments)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the inner model on converted arguments."""
        return self.inner(*self.converted(args), **self.converted(kwargs))


def own_dtype(workload: Workload) -> torch.dtype:
    """The element type of the untouched workload, whatever a transform has made of its model."""
    return replace(workload, model=workload.untouched).dtype


def own_device(workload: Workload) -> torch.device:
    """The device of the untouched workload, whatever a transform has made of its model."""
    return replace(workload, model=workload.untouched).device
