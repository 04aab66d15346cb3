"""Trains a small encoder in the manner of BERT, a plan's whole step at a time.

Dropout 0.1 throughout, and a learning rate that ReduceLROnPlateau lowers. The tokens are random;
put your own text in their place.

    steady tune examples/train_masked_lm.py:factory --precision bf16
    python examples/train_masked_lm.py --budget 3m --steps 500
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

import steadytorch as steady

MASK = 0
"""Id of the token that hides others."""
IGNORED = -100
MASKED = 0.15
"""Share of the tokens to predict."""
WINDOW = 25
"""Steps whose mean loss the schedule looks at; reading it waits for the GPU."""

adamw = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.01)


class Encoder(nn.Module):
    """Transformer encoder with a head for masked tokens.

    Args:
        vocabulary: number of token ids.
        context: maximum tokens per sequence.
        layers: encoder layers.
        width: features per token; divisible by `heads`.
        heads: attention heads per layer.
        dropout: rate in training.
    """

    def __init__(
        self,
        vocabulary: int = 30522,
        context: int = 512,
        layers: int = 6,
        width: int = 512,
        heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.entry = nn.Sequential(nn.LayerNorm(width), nn.Dropout(dropout))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 token ids (N, tokens) to logits (N, tokens, vocabulary)."""
        positions = self.positions.weight[: ids.shape[1]]
        features = self.layers(self.entry(self.tokens(ids) + positions))
        return F.linear(self.head(features), self.tokens.weight, self.bias)


def masked(batch: int, tokens: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless token ids (batch, tokens), some hidden, with the hidden ones as targets.

    Of the tokens to predict, 80 % are masked, 10 % replaced and 10 % kept, as in BERT.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.rand, batch, tokens, generator=generator)
    while True:
        # Frequent ids, as in text, so that there is something to learn.
        ids = 1 + ((vocabulary - 1) * draw() ** 8).long()
        chosen, fate = draw() < MASKED, draw()
        chosen[:, 0] = True  # at least one target
        targets = ids.masked_fill(~chosen, IGNORED)
        ids = ids.masked_fill(chosen & (fate < 0.8), MASK)
        other = torch.randint(1, vocabulary, ids.shape, generator=generator)
        yield torch.where(chosen & (fate > 0.9), other, ids), targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def factory(batch: int = 32, tokens: int = 128, **sizes: int) -> steady.Workload:
    """One training step; `sizes` are those of `Encoder`."""
    torch.manual_seed(0)
    model = Encoder(**sizes).train()
    ids, targets = next(masked(batch, tokens, model.tokens.num_embeddings))
    return steady.Workload.training(model, ids, loss_of, adamw, targets=targets)


def train(
    step: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    window: int = WINDOW,
) -> list[Tensor]:
    """Trains for a number of steps; returns their losses, which are still on the device."""
    scheduler = ReduceLROnPlateau(optimizer, patience=2)
    losses: list[Tensor] = []
    for ids, targets in batches:
        losses.append(step(ids, targets))
        if len(losses) % window == 0:
            scheduler.step(float(torch.stack(losses[-window:]).mean()))
        if len(losses) == steps:
            break
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="3m", help="time for the search without a stored plan")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(arguments)

    workload = factory().to("cuda" if torch.cuda.is_available() else "cpu")
    plan = steady.tune(workload, precision="bf16", budget=options.budget)

    model, (batch, tokens) = workload.model, workload.inputs[0].shape
    optimizer = adamw(model.parameters())
    step = plan.step(model, optimizer, loss_of)
    batches = plan.batches(masked(batch, tokens, model.tokens.num_embeddings), workload.device)
    losses = train(step, optimizer, batches, options.steps)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {options.steps} steps")
    print(step.report())


if __name__ == "__main__":
    main()
