"""The U-Net of 2015, for two classes.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015),
figure 1: unpadded convolutions, copy and crop, no batch normalisation. An image of 572x572 pixels
gives scores for its inner 388x388 pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 2
WIDTHS = (64, 128, 256, 512, 1024)


def _double_convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """Two unpadded 3x3 convolutions; height and width shrink by 4."""
    return [
        nn.Conv2d(inputs, outputs, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3),
        nn.ReLU(inplace=True),
    ]


class ExpandingStep(nn.Module):
    """Up-convolution, concatenation with the cropped skip connection, and two convolutions.

    Args:
        width: channels of the skip tensor and of the output; the input has twice as many.
        margin: pixels cropped off each side of the skip tensor.
    """

    def __init__(self, width: int, margin: int) -> None:
        super().__init__()
        self.margin = margin
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.convolutions = nn.Sequential(*_double_convolution(2 * width, width))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map (N, 2 * width, H, W) and a skip tensor to (N, width, 2 * H - 4, 2 * W - 4)."""
        inner = slice(self.margin, -self.margin)
        return self.convolutions(torch.cat((skip[..., inner, inner], self.up(x)), dim=1))


class UNet(nn.Module):
    """U-Net with a contracting and an expanding path.

    The paper has drop-out at the end of the contracting path. The drop-out rate of 0.5 and the
    position after the two deepest levels follow the authors' published network definition.

    Args:
        widths: channels per level, doubling from one level to the next.
        dropout: rate in training.
    """

    def __init__(self, widths: tuple[int, ...] = WIDTHS, dropout: float = 0.5) -> None:
        super().__init__()
        self.contracting = nn.ModuleList()
        channels = 1
        for level, width in enumerate(widths):
            layers = _double_convolution(channels, width)
            if level >= len(widths) - 2:
                layers.append(nn.Dropout(dropout))
            self.contracting.append(nn.Sequential(*layers))
            channels = width
        self.pool = nn.MaxPool2d(2)
        self.expanding = nn.ModuleList()
        # `lost`: pixels that the level below removes from its map. The up-convolution doubles
        # them, and each side of the skip loses half of that.
        lost = 4
        for width in reversed(widths[:-1]):
            self.expanding.append(ExpandingStep(width, margin=lost))
            lost = 4 + 2 * lost + 4
        self.head = nn.Conv2d(widths[0], CLASSES, 1)
        self._initialize()

    def _initialize(self) -> None:
        # Section 3 of the paper: Gaussian of deviation sqrt(2 / incoming nodes of a neuron).
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                # The windows of the up-convolution do not overlap: one input pixel per output.
                nodes = module.in_channels * (
                    1 if module.transposed else module.weight[0, 0].numel()
                )
                nn.init.normal_(module.weight, std=(2 / nodes) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, H, W) to class scores (N, 2, H - 184, W - 184).

        H and W must be 188 plus a multiple of 16, such as 572: each pooling needs even sizes.
        """
        skips: list[Tensor] = []
        x = self.contracting[0](images)
        for level in self.contracting[1:]:
            skips.append(x)
            x = level(self.pool(x))
        for step, skip in zip(self.expanding, reversed(skips), strict=True):
            x = step(x, skip)
        return self.head(x)


def unet() -> UNet:
    """U-Net of five levels, one input channel and two classes; 31,030,658 parameters."""
    return UNet()
