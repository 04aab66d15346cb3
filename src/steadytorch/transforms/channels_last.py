"""Runs convolutions on images whose channels are stored next to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.conversion import convert, with_converted
from steadytorch.transforms.copying import copy_with
from steadytorch.transforms.traits import NO_CONVOLUTION, convolutions, decide, no_copy
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Stores a floating-point tensor of 4 or 5 dimensions channels last; returns others as is."""
    layout = _FORMATS.get(tensor.dim())
    if layout is None or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=layout)


class ChannelsLast(Transform):
    """Weights of convolutions, and image inputs, in the channels-last layout.

    Layers keep the layout of what they are given, so that it runs through the network. Outputs have
    the same values and shapes as before; an image that is an output may be stored channels last.
    """

    name = "channels_last"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs 2-d or 3-d convolutions that are not channels last already; inference only."""
        weights = _weights(workload.module)
        return decide(
            *no_copy(workload),
            (not weights, f"{NO_CONVOLUTION} over images or volumes"),
            (
                _all_last(weights) and _all_last(tensors_of(workload.inputs)),
                "already channels last",
            ),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on the converted copy, with converted inputs; nothing to undo."""
        weights = {id(weight) for weight in _weights(workload.model)}

        def converted(tensor: torch.Tensor) -> torch.Tensor:
            return to_channels_last(tensor) if id(tensor) in weights else tensor

        model = ChannelsLastModel(copy_with(workload.model, converted))
        yield with_converted(workload, model, to_channels_last)


class ChannelsLastModel(nn.Module):
    """A model that is given its images channels last.

    Args:
        inner: the model, its convolutions' weights channels last.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the inner model on converted inputs."""
        return self.inner(*convert(to_channels_last, args), **convert(to_channels_last, kwargs))


def _weights(module: nn.Module | None) -> list[torch.Tensor]:
    return [layer.weight for layer in convolutions(module) if layer.weight.dim() in _FORMATS]


def _all_last(tensors: list[torch.Tensor]) -> bool:
    images = [t for t in tensors if t.dim() in _FORMATS and t.is_floating_point()]
    return all(t.is_contiguous(memory_format=_FORMATS[t.dim()]) for t in images)
