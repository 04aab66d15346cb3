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


def convert(function: Convert, value: Any) -> Any:
    """Applies `function` to each tensor in nested containers and returns the same structure.

    The same as `map_tensors`, with a short way for what most models take and return: `map_tensors`
    costs several microseconds a call.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = type(value)
    if kind is tuple:
        return tuple([convert(function, item) for item in value])
    if kind is list:
        return [convert(function, item) for item in value]
    if kind is dict:
        return {key: convert(function, item) for key, item in value.items()}
    return map_tensors(function, value)


def with_converted(workload: Workload, model: Any, function: Convert) -> Workload:
    """The workload through `model`, its inputs already converted, so that `model` need not."""
    return replace(
        workload,
        model=model,
        inputs=convert(function, workload.inputs),
        kwargs=convert(function, dict(workload.kwargs)),
    )


def own_dtype(workload: Workload) -> torch.dtype:
    """The element type of the untouched workload, whatever a transform has made of its model."""
    return replace(workload, model=workload.untouched).dtype


def own_device(workload: Workload) -> torch.device:
    """The device of the untouched workload, whatever a transform has made of its model."""
    return replace(workload, model=workload.untouched).device
