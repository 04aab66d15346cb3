"""Vision Transformer ViT-B/16 for 1000 classes.

Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020): class token, learned positions, pre-norm
encoder, linear head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from steadytorch.workload.bundled.transformer import Block

CLASSES = 1000


class Encoder(nn.Module):
    """Learned position embeddings, transformer blocks and a final layer normalisation."""

    def __init__(self, tokens: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        eps = 1e-6
        self.positions = nn.Parameter(torch.empty(1, tokens, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, eps=eps, gelu="none", causal=False, dropout=dropout)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        return self.norm(self.blocks(self.dropout(tokens + self.positions)))


class VisionTransformer(nn.Module):
    """ViT with a class token.

    Args:
        image: height and width of all images, a multiple of `patch`.
        patch: side of the square patches that become tokens.
        layers: transformer blocks.
        width: features per token; divisible by `heads`.
        heads: attention heads per block.
        dropout: rate in training.
    """

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.encoder = Encoder(tokens, layers, width, heads, dropout)
        self.head = nn.Linear(width, CLASSES)
        self._initialize()

    def _initialize(self) -> None:
        # The fine-tuning recipe zeroes the class token and the head. That would make all outputs
        # zero and hide numerical errors of candidates.
        _truncated_normal_(self.class_token, 0.02)
        _truncated_normal_(self.encoder.positions, 0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                # The patch embedding keeps the variance of the pixels.
                is_linear = isinstance(module, nn.Linear)
                std = 0.02 if is_linear else module.weight[0].numel() ** -0.5
                _truncated_normal_(module.weight, std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, image, image) to class logits (N, 1000)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(images.shape[0], -1, -1)
        encoded = self.encoder(torch.cat((class_token, patches), dim=1))
        return self.head(encoded[:, 0])


@torch.no_grad()
def _truncated_normal_(tensor: Tensor, std: float) -> None:
    """Fill in place from a normal distribution truncated at two standard deviations.

    Uses the inverse distribution function, several times faster than `nn.init.trunc_normal_`.
    `nn.init.trunc_normal_` would take most of the time for building the model.
    """
    bound = math.erf(math.sqrt(2))
    tensor.uniform_(-bound, bound).erfinv_().mul_(std * math.sqrt(2))


def vit_b_16() -> VisionTransformer:
    """ViT-B/16 for 224x224 images, with 86,567,656 parameters."""
    return VisionTransformer()
