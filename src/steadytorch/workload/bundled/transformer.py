"""The pre-norm transformer block that ViT and GPT-2 share.

Vaswani et al., "Attention Is All You Need" (2017), with the layer normalisation moved to the start
of each branch, as in ViT and GPT-2.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Multi-head self-attention through `scaled_dot_product_attention`.

    Args:
        width: features per token; divisible by `heads`.
        heads: attention heads.
        causal: whether a token attends only to itself and earlier ones.
        dropout: rate applied to the attention weights in training.
    """

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.split = (3, heads, width // heads)
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        # (N, tokens, 3 * width) -> (3, N, heads, tokens, width / heads)
        qkv = self.qkv(x).unflatten(-1, self.split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            qkv[0],
            qkv[1],
            qkv[2],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, then an MLP with four times the width, each with a residual connection.

    Args:
        width: features per token; divisible by `heads`.
        heads: attention heads.
        eps: constant of the layer normalisations.
        gelu: "none" for the exact GELU, "tanh" for its tanh approximation.
        causal: whether a token attends only to itself and earlier ones.
        dropout: rate in training, on the attention weights and on the output of each branch.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        eps: float,
        gelu: Literal["none", "tanh"],
        causal: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = SelfAttention(width, heads, causal=causal, dropout=dropout)
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width, eps=eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate=gelu),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp(self.mlp_norm(x))
