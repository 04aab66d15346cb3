"""Bundled workload architectures: exactly as published, with random weights and no downloads.

`BUNDLED` is the only list of the architectures. Importing this module does not import torch, so
names can be listed and auto-completed quickly. An architecture is imported only when it is built.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steadytorch.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["BUNDLED", "Bundled", "build", "example_inputs", "names"]


@dataclass(frozen=True)
class Bundled:
    """One bundled architecture and the shape of the inputs that it was published for.

    Attributes:
        name: name on the command line.
        module: module of this package that defines it.
        builder: function of `module` that takes no arguments and returns the model.
        summary: one line for listings.
        sample_shape: shape of one input sample, without the batch dimension.
        vocabulary: for token inputs, the number of token ids; None where the input is an image.
    """

    name: str
    module: str
    builder: str
    summary: str
    sample_shape: tuple[int, ...]
    vocabulary: int | None = None


_IMAGE = (3, 224, 224)

BUNDLED: dict[str, Bundled] = {
    entry.name: entry
    for entry in (
        Bundled(
            name="resnet18",
            module="resnet",
            builder="resnet18",
            summary="ResNet-18, image classification, 11.7 M parameters",
            sample_shape=_IMAGE,
        ),
        Bundled(
            name="resnet50",
            module="resnet",
            builder="resnet50",
            summary="ResNet-50 v1.5, image classification, 25.6 M parameters",
            sample_shape=_IMAGE,
        ),
        Bundled(
            name="mobilenet_v3_large",
            module="mobilenet_v3",
            builder="mobilenet_v3_large",
            summary="MobileNetV3-Large, image classification, 5.5 M parameters",
            sample_shape=_IMAGE,
        ),
        Bundled(
            name="vit_b_16",
            module="vit",
            builder="vit_b_16",
            summary="ViT-B/16, image classification, 86.6 M parameters",
            sample_shape=_IMAGE,
        ),
        Bundled(
            name="unet",
            module="unet",
            builder="unet",
            summary="U-Net of 2015, image segmentation, 31.0 M parameters",
            sample_shape=(1, 572, 572),
        ),
        Bundled(
            name="gpt2",
            module="gpt2",
            builder="gpt2",
            summary="GPT-2, language model, 124.4 M parameters",
            sample_shape=(256,),
            vocabulary=50257,
        ),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of the bundled architectures in listing order."""
    return tuple(BUNDLED)


def build(name: str) -> nn.Module:
    """Build a bundled architecture on the default device, in eval mode, with random weights.

    The weights come from torch's global generator: call `torch.manual_seed` first for reproducible
    weights.

    Raises:
        KeyError: `name` is not one of `names()`.
    """
    entry = BUNDLED[name]
    module = importlib.import_module(f"{__name__}.{entry.module}")
    return getattr(module, entry.builder)().eval()


def example_inputs(name: str, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Draw random inputs on the CPU for one call of a bundled architecture.

    Args:
        name: one of `names()`.
        batch: samples per call, at least 1.
        generator: CPU generator; the same state gives the same inputs.

    Returns:
        The positional arguments of the call: standard normal float32 images of shape
        (batch, channels, height, width), or int64 token ids of shape (batch, tokens).

    Raises:
        KeyError: `name` is not one of `names()`.
        UsageError: `batch` is below 1.
    """
    import torch

    entry = BUNDLED[name]
    if batch < 1:
        raise UsageError(f"batch size must be at least 1, got {batch}")
    shape = (batch, *entry.sample_shape)
    if entry.vocabulary is not None:
        return (torch.randint(entry.vocabulary, shape, generator=generator),)
    return (torch.randn(shape, generator=generator, dtype=torch.float32),)
