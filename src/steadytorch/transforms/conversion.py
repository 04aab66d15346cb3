"""Conversion of the tensors in arguments and outputs: cheap, and transparent to Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

Convert = Callable[[torch.Tensor], torch.Tensor]

HalfName = Literal["bf16", "fp16"]
HALF_TYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_converted(workload: Workload, model: Any, function: Convert) -> Workload:
    """The workload through `model`, its inputs already converted, so that `model` need not."""
    return replace(
        workload,
        model=model,
        inputs=map_tensors(function, workload.inputs),
        kwargs=map_tensors(function, dict(workload.kwargs)),
    )


def own_dtype(workload: Workload) -> torch.dtype:
    """The element type of the untouched workload, whatever a transform has made of its model."""
    return replace(workload, model=workload.untouched).dtype


def own_device(workload: Workload) -> torch.device:
    """The device of the untouched workload, whatever a transform has made of its model."""
    return replace(workload, model=workload.untouched).device
