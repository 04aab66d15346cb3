"""Runs convolutions over patches that do not overlap as the matrix products that they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.copying import copy_with
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import PLAIN_CALLABLE, decide, no_cuda
from steadytorch.workload.workload import Workload

_NO_PATCHES = "the model has no convolution over patches that do not overlap"


class LinearPatches(Transform):
    """Convolutions whose stride is their kernel size as products of patches and weights.

    Such are the patch embeddings of vision transformers, and the stem and the downsampling layers
    of ConvNeXt. Their patches share no pixel, so that laying out the image anew, patch by patch, is
    one copy of it; what is left to do is one matrix product, for which there are faster kernels
    than for a convolution of few channels or of large windows.

    Works on a copy of the modules that shares the weights. The layers stay in their places, with
    their names, attributes and hooks; results have the strides that the convolution gives them.
    Sums run in another order. In float32 it is PyTorch's precision for matrix products that
    counts, and no longer that for convolutions.
    """

    name = "linear_patches"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, inference, and such a layer."""
        return decide(
            no_cuda(facts),
            (workload.module is None, PLAIN_CALLABLE),
            (workload.is_training, "for inference"),
            (workload.module is not None and not patch_layers(workload.module), _NO_PATCHES),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on a copy with such layers exchanged; there is nothing to undo."""
        model = copy_with(workload.model, lambda tensor: tensor, apart=True)
        for layer in patch_layers(model):
            layer.__class__ = _KINDS[type(layer)]
        yield workload.with_model(model)


class _OfPatches:
    """A convolution layer over patches; stands before PyTorch's own class."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv_of_patches(input, weight, bias)


class PatchConv2d(_OfPatches, nn.Conv2d):
    """`nn.Conv2d` as a matrix product."""


class PatchConv3d(_OfPatches, nn.Conv3d):
    """`nn.Conv3d` as a matrix product."""


_KINDS: dict[type, Any] = {nn.Conv2d: PatchConv2d, nn.Conv3d: PatchConv3d}


def patch_layers(module: nn.Module) -> list[nn.Module]:
    """The convolutions of two and three dimensions whose patches touch and do not overlap.

    Those of single pixels are left out: libraries take them for matrix products anyway. A subclass
    or a parametrised layer has a type of its own, and may compute something else.
    """
    return [layer for layer in module.modules() if type(layer) in _KINDS and _touches(layer)]


def _touches(layer: Any) -> bool:
    ones, zeros = (1,) * len(layer.stride), (0,) * len(layer.stride)
    return (
        tuple(layer.stride) == tuple(layer.kernel_size) != ones
        and layer.padding in ("valid", zeros)
        and tuple(layer.dilation) == ones
        and layer.groups == 1
    )


@torch.fx.wrap  # what it does depends on strides, which a graph of symbols does not have
def conv_of_patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution without padding whose stride is its kernel size, as a matrix product.

    Args:
        x: shape (N, C, spatial), or without N; of two or three spatial dimensions, as `weight` has.
            What is left beside the last whole patch is left out, as a convolution does.
        weight: shape (K, C, kernel). Viewed where it lies as `x` does, NCHW or channels last;
            copied at each call where not.
        bias: shape (K,), or None.

    Returns:
        Shape (N, K, spatial / kernel), or without N; channels last if `x` or `weight` is.
    """
    kernel = weight.shape[2:]
    n = len(kernel)
    patches = x
    for axis, size in enumerate(kernel, -n):
        whole = patches.shape[axis] // size
        patches = patches.narrow(axis, 0, whole * size).unflatten(axis, (whole, size))
    channels, windows = (-2 * n - 1,), tuple(range(-2 * n + 1, 0, 2))
    last = _is_channels_last(x, n)
    becomes_last = _is_taken_for_last(x, n) or _is_taken_for_last(weight, n)
    # Each pixel's channels, or each channel's pixels: as they lie in memory, in long runs.
    within = (*windows, *channels) if last else (*channels, *windows)
    rows = patches.movedim(within, tuple(range(-n - 1, 0))).flatten(-n - 1)
    matrix = (weight.movedim(1, -1) if last else weight).flatten(1)
    y = F.linear(rows, matrix, bias).movedim(-1, -n - 1)
    # Flattened, so that axes of length one have the strides that they have in new memory.
    return y if becomes_last else y.flatten().view(y.shape)


def _is_channels_last(images: Tensor, n: int) -> bool:
    """Whether they lie so, pixel by pixel; a step of zero, of what is spread, is no layout."""
    channels, *spatial = images.stride()[-n - 1 :]
    return 0 < channels < spatial[-1] and spatial == sorted(spatial, reverse=True)


def _is_taken_for_last(images: Tensor, n: int) -> bool:
    """Whether PyTorch takes them for channels last, by its rule, and makes results so."""
    if images.dim() == n + 1:
        images = images.unsqueeze(0)
    sizes, strides, least = images.shape, images.stride(), 0
    for axis in (1, *range(n + 1, 1, -1), 0):
        if sizes[axis] == 0 or strides[axis] < least or strides[1] == 0:
            return False
        # With nothing but the batch longer than one, both ways are the same.
        if axis == 0 and least == strides[1]:
            return False
        least = strides[axis] * sizes[axis]
    return True
