"""Provokes autotuning-in-loop: cuDNN's benchmark mode with images of ever new sizes.

For each new size the mode times up to ten algorithms, which takes many times as long as the
convolution. `mended` pads all images to one size, which is timed once. Tuning also loads kernels,
allocates and frees workspace, and synchronises, so other findings may appear.

    steady explain examples/autotuning_in_loop.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad

LARGEST = 160


class AnySize(nn.Module):
    """A convolution of images whose height and width change with each call."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.padded, self.calls = padded, 0
        self.convolution = nn.Conv2d(64, 64, 3, padding=1, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        width, height = 96 + self.calls % 64, 96 + self.calls // 64 % 64
        self.calls += 1
        images = images[..., :height, :width]
        if self.padded:
            images = pad(images, (0, LARGEST - width, 0, LARGEST - height))
        # Imported here, because cudnn's module object cannot be pickled for the worker.
        from torch.backends import cudnn

        cudnn.benchmark = True
        return self.convolution(images)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return AnySize(padded=False), torch.randn(16, 64, LARGEST, LARGEST)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return AnySize(padded=True), torch.randn(16, 64, LARGEST, LARGEST)
