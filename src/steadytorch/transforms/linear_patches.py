"""Runs convolutions over non-overlapping patches as matrix products."""

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

_NO_PATCHES = "the model has no convolution over non-overlapping patches (stride = kernel size > 1)"


class LinearPatches(Transform):
    """Replaces convolutions whose stride equals their kernel size with matrix products.

    Examples of such convolutions are the patch embeddings of vision transformers, and the stem and
    downsampling layers of ConvNeXt. Patches do not overlap, so one copy rearranges the image by
    patch, and one matrix product computes the convolution. For few channels or large windows,
    matrix product kernels are faster than convolution kernels.

    Works on a copy of the modules that shares the weights. Layers keep their names, attributes and
    hooks; outputs keep the strides that the convolution would return. Products are summed in
    another order than in the convolution. In float32, PyTorch's matmul precision setting applies
    instead of the one for convolutions.
    """

    name = "linear_patches"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, inference, and a convolution over non-overlapping patches."""
        return decide(
            no_cuda(facts),
            (workload.module is None, PLAIN_CALLABLE),
            (workload.is_training, "inference only"),
            (workload.module is not None and not patch_layers(workload.module), _NO_PATCHES),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with its patch layers replaced in a copy; there is nothing to undo."""
        model = copy_with(workload.model, lambda tensor: tensor, apart=True)
        for layer in patch_layers(model):
            layer.__class__ = _KINDS[type(layer)]
        yield workload.with_model(model)


class _OfPatches:
    """Mixin that computes a convolution by `conv_of_patches`; list it before PyTorch's class."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv_of_patches(input, weight, bias)


class PatchConv2d(_OfPatches, nn.Conv2d):
    """`nn.Conv2d` over non-overlapping patches, computed as a matrix product."""


class PatchConv3d(_OfPatches, nn.Conv3d):
    """`nn.Conv3d` over non-overlapping patches, computed as a matrix product."""


_KINDS: dict[type, Any] = {nn.Conv2d: PatchConv2d, nn.Conv3d: PatchConv3d}


def patch_layers(module: nn.Module) -> list[nn.Module]:
    """Find the 2-d and 3-d convolutions whose patches are adjacent and do not overlap.

    1x1 convolutions are left out: libraries already run them as matrix products. Subclasses of
    `nn.Conv2d` and `nn.Conv3d` and parametrised layers are left out, because they may compute
    something else.
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


@torch.fx.wrap  # depends on strides, which a symbolic graph lacks
def conv_of_patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute an unpadded convolution whose stride equals its kernel size as a matrix product.

    Args:
        x: shape (N, C, spatial) or (C, spatial), with as many spatial dimensions (2 or 3) as
            `weight`. A remainder after the last whole patch is dropped, as in a convolution.
        weight: shape (K, C, kernel). Used without a copy if its layout (NCHW or channels last)
            matches `x`; copied at each call otherwise.
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
    # Order within a patch follows memory, so that the copy reads long contiguous runs.
    within = (*windows, *channels) if last else (*channels, *windows)
    rows = patches.movedim(within, tuple(range(-n - 1, 0))).flatten(-n - 1)
    matrix = (weight.movedim(1, -1) if last else weight).flatten(1)
    y = F.linear(rows, matrix, bias).movedim(-1, -n - 1)
    # Flattened first, so that axes of length one get standard strides.
    return y if becomes_last else y.flatten().view(y.shape)


def _is_channels_last(images: Tensor, n: int) -> bool:
    """Whether the memory order is channels last; False for broadcast channels or spatial axes."""
    channels, *spatial = images.stride()[-n - 1 :]
    return 0 < channels < spatial[-1] and spatial == sorted(spatial, reverse=True)


def _is_taken_for_last(images: Tensor, n: int) -> bool:
    """Whether PyTorch treats the tensor as channels last and makes a channels-last output."""
    if images.dim() == n + 1:
        images = images.unsqueeze(0)
    sizes, strides, least = images.shape, images.stride(), 0
    for axis in (1, *range(n + 1, 1, -1), 0):
        if sizes[axis] == 0 or strides[axis] < least or strides[1] == 0:
            return False
        # If only the batch is longer than one, both layouts are identical.
        if axis == 0 and least == strides[1]:
            return False
        least = strides[axis] * sizes[axis]
    return True
