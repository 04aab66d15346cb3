"""Runs convolutions in the channels-last memory format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.conversion import Converting
from steadytorch.rewrite.copying import copy_with
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import (
    NO_CONVOLUTION,
    PLAIN_CALLABLE,
    convolutions,
    decide,
    hooks_see,
    refuse_if,
)
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

_SEEN = "channels-last images"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a 4-d or 5-d floating-point tensor to channels last; return others as they are."""
    layout = _FORMATS.get(tensor.dim())
    if layout is None or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=layout)


class ChannelsLast(Transform):
    """Converts convolution weights and image inputs to the channels-last layout.

    Layers preserve the layout of their input, so channels last propagates through the network.
    Output images are converted back to contiguous, unless the caller's inputs are channels last.

    Inference runs on a converted copy of the weights. A weight of 1x1 or of one input channel fits
    both layouts, and PyTorch decides by its strides. It is converted too, so that a convolution
    whose input has lost the layout, as after attention over windows, restores it.

    Training runs the original model on converted images. At each call, convolutions convert their
    weights to channels last, and weight gradients back to the layout of the weights.
    """

    name = "channels_last"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs a model without hooks whose 2-d or 3-d convolutions are not yet channels last."""
        weights = _weights(workload.module)
        images = [t for t in tensors_of(workload.inputs) if _is_image(t)]
        groups = weights, images
        # In training, channels-last weights or images alone make convolutions run channels last;
        # images of one channel are both.
        if workload.is_training:
            last = any(map(_made_last, groups))
        else:
            last = all(map(_is_strictly_last, weights)) and _all_last(images)
        return decide(
            (workload.module is None, PLAIN_CALLABLE),
            (not weights, f"{NO_CONVOLUTION} over images or volumes"),
            (workload.is_training and not images, "the inputs contain no image"),
            (last, "already channels last"),
            hooks_see(workload, _SEEN),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a model that converts its inputs; there is nothing to undo.

        Raises:
            UnsupportedError: the model has hooks.
        """
        refuse_if(hooks_see(workload, _SEEN))
        given = [t for t in tensors_of((workload.inputs, dict(workload.kwargs))) if _is_image(t)]
        back = None if any(map(_is_last, given)) else _in_order
        if workload.is_training:
            yield workload.with_model(Converting(workload.model, _strictly_last, back))
            return
        weights = {id(weight) for weight in _weights(workload.model)}

        def converted(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in weights or _is_strictly_last(tensor):
                return tensor
            return torch.empty_like(tensor, memory_format=_FORMATS[tensor.dim()]).copy_(tensor)

        copied = copy_with(workload.model, converted, apart=True)
        yield workload.with_model(Converting(copied, to_channels_last, back))


def _strictly_last(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to channels last, with channels-last strides even for one channel.

    The channel stride of a one-channel tensor is arbitrary, but PyTorch infers the layout from that
    stride, and convolutions use the inferred layout.
    """
    if not _is_image(tensor) or tensor.shape[1] != 1:
        return to_channels_last(tensor)
    flat = to_channels_last(tensor)
    return flat.as_strided(flat.shape, (flat.stride(0), 1, *flat.stride()[2:]))


def _is_last(image: torch.Tensor) -> bool:
    layout = _FORMATS[image.dim()]
    return image.is_contiguous(memory_format=layout) and not image.is_contiguous()


def _is_strictly_last(tensor: torch.Tensor) -> bool:
    """Whether even the strides that do not matter to memory are those of channels last."""
    layout = _FORMATS[tensor.dim()]
    strides = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
    return tensor.stride() == strides


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if _is_image(tensor) and _is_last(tensor) else tensor


def _weights(module: nn.Module | None) -> list[torch.Tensor]:
    """Weights of convolutions, and what parametrizations such as `weight_norm` make them of."""
    held = (t for layer in convolutions(module) for t in (*layer.parameters(), *layer.buffers()))
    return [tensor for tensor in held if _is_image(tensor)]


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() in _FORMATS and tensor.is_floating_point()


def _all_last(images: list[torch.Tensor]) -> bool:
    return all(t.is_contiguous(memory_format=_FORMATS[t.dim()]) for t in images)


def _made_last(images: list[torch.Tensor]) -> bool:
    """Whether all images are channels last, and at least one is not also contiguous."""
    return _all_last(images) and any(map(_is_last, images))
