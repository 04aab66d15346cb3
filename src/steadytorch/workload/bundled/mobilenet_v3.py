"""MobileNetV3-Large for 1000 classes.

Howard et al., "Searching for MobileNetV3" (2019), table 1. As in the paper, squeeze-and-excite
reduces to a quarter of the expansion channels and gates with a hard sigmoid.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

CLASSES = 1000


class Stage(NamedTuple):
    """Parameters of an inverted residual block: one row of table 1 of the paper."""

    kernel: int
    expansion: int
    outputs: int
    squeeze: bool
    activation: type[nn.Module]
    stride: int


_RE, _HS = nn.ReLU, nn.Hardswish

STEM_WIDTH = 16
HEAD_WIDTH = 1280
LARGE = (
    Stage(3, 16, 16, False, _RE, 1),
    Stage(3, 64, 24, False, _RE, 2),
    Stage(3, 72, 24, False, _RE, 1),
    Stage(5, 72, 40, True, _RE, 2),
    Stage(5, 120, 40, True, _RE, 1),
    Stage(5, 120, 40, True, _RE, 1),
    Stage(3, 240, 80, False, _HS, 2),
    Stage(3, 200, 80, False, _HS, 1),
    Stage(3, 184, 80, False, _HS, 1),
    Stage(3, 184, 80, False, _HS, 1),
    Stage(3, 480, 112, True, _HS, 1),
    Stage(3, 672, 112, True, _HS, 1),
    Stage(5, 672, 160, True, _HS, 2),
    Stage(5, 960, 160, True, _HS, 1),
    Stage(5, 960, 160, True, _HS, 1),
)


def _round_to_8(channels: float) -> int:
    """The multiple of 8 nearest to `channels`, or the next one if that is over 10 % too low."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _convolution(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Convolution with "same" padding, then batch normalisation."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    ]


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _round_to_8(channels / 4)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, H, W) to the same shape."""
        return self.gate(x) * x


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, optional squeeze-and-excite gate, and projection.

    The block's output is added to its input if both have the same shape.
    """

    def __init__(self, inputs: int, stage: Stage) -> None:
        super().__init__()
        width = stage.expansion
        layers: list[nn.Module] = []
        if width != inputs:
            layers += [*_convolution(inputs, width), stage.activation(inplace=True)]
        layers += _convolution(width, width, stage.kernel, stage.stride, groups=width)
        layers.append(stage.activation(inplace=True))
        if stage.squeeze:
            layers.append(SqueezeExcite(width))
        layers += _convolution(width, stage.outputs)
        self.branch = nn.Sequential(*layers)
        self.residual = stage.stride == 1 and inputs == stage.outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return x + self.branch(x) if self.residual else self.branch(x)


class MobileNetV3(nn.Module):
    """MobileNetV3 built from the rows of table 1 of the paper."""

    def __init__(self, stages: tuple[Stage, ...], dropout: float = 0.2) -> None:
        super().__init__()
        layers = [*_convolution(3, STEM_WIDTH, 3, 2), nn.Hardswish(inplace=True)]
        channels = STEM_WIDTH
        for stage in stages:
            layers.append(InvertedResidual(channels, stage))
            channels = stage.outputs
        features = 6 * channels
        layers += [*_convolution(channels, features), nn.Hardswish(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(
            nn.Linear(features, HEAD_WIDTH),
            nn.Hardswish(inplace=True),
            nn.Dropout(dropout, inplace=True),
            nn.Linear(HEAD_WIDTH, CLASSES),
        )
        self._initialize()

    def _initialize(self) -> None:
        # He initialisation over the outputs that one input reaches: its own group's. Counting all
        # channels of a depthwise convolution instead shrinks the signal some tenfold per block,
        # and the logits then vanish in half precision.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.weight[:, 0].numel() // module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to class logits (N, 1000)."""
        return self.head(self.pool(self.features(images)).flatten(1))


def mobilenet_v3_large() -> MobileNetV3:
    """MobileNetV3-Large with width multiplier 1.0 and 5,483,032 parameters."""
    return MobileNetV3(LARGE)
