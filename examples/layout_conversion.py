"""Provokes layout-conversion: images are NCHW, but tensor cores need NHWC.

In `slow`, cuDNN converts every input and every result. `mended` has weights and input in
`torch.channels_last`, so no conversion is needed.

    steady explain examples/layout_conversion.py:slow --device cuda
"""

from __future__ import annotations

import torch
from torch import nn


def network() -> nn.Module:
    layers = (nn.Conv2d(256, 256, 3, padding=1, bias=False) for _ in range(8))
    return nn.Sequential(*layers).half().eval()


def slow() -> tuple[nn.Module, torch.Tensor]:
    return network(), torch.randn(64, 256, 28, 28, dtype=torch.float16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    model, images = slow()
    return model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
