"""GPT-2, the smallest of the four published sizes.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): pre-norm blocks,
learned positions, tanh-approximated GELU, language-model head tied to the token embedding.
"""

from __future__ import annotations

from torch import Tensor, nn

from steadytorch.workload.bundled.transformer import Block


class GPT2(nn.Module):
    """Causal language model.

    Args:
        vocabulary: number of token ids.
        context: maximum tokens per sequence; each has a learned position.
        layers: transformer blocks.
        width: features per token; divisible by `heads`.
        heads: attention heads per block.
        dropout: rate in training.
    """

    def __init__(
        self,
        vocabulary: int = 50257,
        context: int = 1024,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        eps = 1e-5
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, eps=eps, gelu="tanh", causal=True, dropout=dropout)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width, eps=eps)
        # Built on "meta" because its weight is replaced by the tied one.
        self.head = nn.Linear(width, vocabulary, bias=False, device="meta")
        self.head.weight = self.tokens.weight
        self._initialize(layers)

    def _initialize(self, layers: int) -> None:
        std = 0.02
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.Linear) and module is not self.head:
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        # Each block adds two branches to the residual stream. Scale their last weights down, so
        # that the variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=std / (2 * layers) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 token ids (N, tokens) to next-token logits (N, tokens, vocabulary)."""
        # A slice of the table is the look-up of positions 0, 1, 2, ... without the index tensor.
        positions = self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(self.dropout(self.tokens(ids) + positions))))


def gpt2() -> GPT2:
    """GPT-2 with 12 layers and 124,439,808 parameters; the tied head is counted once."""
    return GPT2()
