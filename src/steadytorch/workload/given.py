"""Checks the workload that a caller passes, before anything is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from steadytorch.errors import UsageError
from steadytorch.workload.signature import named_leaves
from steadytorch.workload.workload import Workload


def workload_of(given: Any) -> Workload:
    """Converts a `Workload` or a pair `(model, inputs)` to a checked `Workload`.

    Raises:
        UsageError: `given` is neither, or one of its tensors holds no values.
    """
    if isinstance(given, Workload):
        return with_values(given)
    if isinstance(given, tuple | list) and len(given) == 2 and callable(given[0]):
        return with_values(Workload(*given))
    raise UsageError(f"{_described(given)} is not a workload: pass {_instead(given)}")


def _described(given: Any) -> str:
    kind = type(given).__name__
    if isinstance(given, nn.Module):
        return f"the model {kind} alone"
    if isinstance(given, str):
        return f"the text {given!r:.60}"
    return f"a {kind}" + (f" of {len(given)}" if isinstance(given, tuple | list) else "")


def _instead(given: Any) -> str:
    if isinstance(given, str):
        return f"steady.load_workload({given!r:.60})"
    return "steady.Workload(model, inputs), or the pair (model, inputs)"


def with_values(workload: Workload) -> Workload:
    """Returns the workload if all its tensors hold values, unlike meta or fake tensors.

    Raises:
        UsageError: a tensor holds no values; the message names it and what to do.
    """
    for name, tensor in _tensors_of(workload):
        if (reason := _no_values(tensor)) is not None:
            raise UsageError(f"{workload.name} cannot be run: {name} {reason}")
    return workload


def _tensors_of(workload: Workload) -> Iterator[tuple[str, torch.Tensor]]:
    step = workload.training_step
    for owner, module in (("", workload.model), ("loss ", step and step.loss)):
        if isinstance(module, nn.Module):
            yield from ((f"{owner}parameter {n!r}", t) for n, t in module.named_parameters())
            yield from ((f"{owner}buffer {n!r}", t) for n, t in module.named_buffers())
    inputs = (tuple(workload.inputs), dict(workload.kwargs))
    for path, leaf in named_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            yield f"input {path}", leaf


def _no_values(tensor: torch.Tensor) -> str | None:
    """Reason why a tensor holds no values, with advice; None if it holds values."""
    if isinstance(tensor, FakeTensor):
        return "is a fake tensor, which holds no values: create it outside FakeTensorMode"
    if is_lazy(tensor):
        return "is not initialised yet: call the model once first"
    if tensor.device.type == "meta":
        return (
            "is on the meta device, which holds no values: create it on a real device, or load "
            "values into model.to_empty(device='cpu')"
        )
    return None
