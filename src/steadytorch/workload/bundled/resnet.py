"""ResNet-18 and ResNet-50 for 1000 classes.

He et al., "Deep Residual Learning for Image Recognition" (2015), table 1. ResNet-50 is "v1.5": the
stride of a bottleneck is in its 3x3 convolution, not in the 1x1 convolution before it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

CLASSES = 1000
STAGE_WIDTHS = (64, 128, 256, 512)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Convolution with "same" padding, then batch normalisation."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def _basic_branch(inputs: int, width: int, stride: int) -> list[nn.Module]:
    return [
        *_convolution(inputs, width, 3, stride),
        nn.ReLU(inplace=True),
        *_convolution(width, width, 3),
    ]


def _bottleneck_branch(inputs: int, width: int, stride: int) -> list[nn.Module]:
    return [
        *_convolution(inputs, width, 1),
        nn.ReLU(inplace=True),
        *_convolution(width, width, 3, stride),
        nn.ReLU(inplace=True),
        *_convolution(width, 4 * width, 1),
    ]


class ResidualBlock(nn.Module):
    """`relu(branch(x) + shortcut(x))`; the shortcut projects only where the shape changes."""

    def __init__(self, branch: list[nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        changes_shape = stride != 1 or inputs != outputs
        projection = _convolution(inputs, outputs, 1, stride) if changes_shape else []
        self.shortcut = nn.Sequential(*projection)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return self.activation(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network with four stages of residual blocks.

    Args:
        branch: builds the residual branch of a block from (inputs, width, stride).
        expansion: output channels of a block per unit of its stage's width.
        depths: blocks per stage.
    """

    def __init__(
        self,
        branch: Callable[[int, int, int], list[nn.Module]],
        expansion: int,
        depths: tuple[int, int, int, int],
    ) -> None:
        super().__init__()
        channels = STAGE_WIDTHS[0]
        self.stem = nn.Sequential(
            *_convolution(3, channels, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(STAGE_WIDTHS, depths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                outputs = expansion * width
                blocks.append(
                    ResidualBlock(branch(channels, width, stride), channels, outputs, stride)
                )
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, CLASSES)
        self._initialize()

    def _initialize(self) -> None:
        # He et al., "Delving Deep into Rectifiers" (2015); batch normalisation starts at identity.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to class logits (N, 1000)."""
        features = self.blocks(self.stem(images))
        return self.head(self.pool(features).flatten(1))


def resnet18() -> ResNet:
    """ResNet-18, with two basic blocks in each stage and 11,689,512 parameters."""
    return ResNet(_basic_branch, expansion=1, depths=(2, 2, 2, 2))


def resnet50() -> ResNet:
    """ResNet-50 v1.5, with 3, 4, 6 and 3 bottlenecks per stage and 25,557,032 parameters."""
    return ResNet(_bottleneck_branch, expansion=4, depths=(3, 4, 6, 3))
