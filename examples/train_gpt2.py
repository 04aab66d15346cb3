"""Trains GPT-2 on a stream of tokens, a plan's whole step at a time.

AdamW with two parameter groups, gradients clipped at norm 1, a cosine schedule, and four
micro-batches per update. The tokens are made up; put your own stream in their place.

    steady tune examples/train_gpt2.py:factory --precision bf16
    python examples/train_gpt2.py --budget 5m --steps 100
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import steadytorch as steady
from steadytorch.workload.bundled.gpt2 import GPT2

ACCUMULATE = 4
CLIP = 1.0
PHRASES, LENGTH = 1000, 16
"""The text repeats this many phrases of this many tokens."""


def stream(batch: int, tokens: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless token ids (batch, tokens) with the next ids as targets: phrases in random order."""
    generator = torch.Generator().manual_seed(0)
    phrases = torch.randint(vocabulary, (PHRASES, LENGTH), generator=generator)
    while True:
        order = torch.randint(PHRASES, (batch, tokens // LENGTH + 1), generator=generator)
        text = phrases[order].flatten(1)
        yield text[:, :tokens].contiguous(), text[:, 1 : tokens + 1].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW that decays matrices, but neither biases nor norms."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


def factory(batch: int = 8, tokens: int = 1024, **sizes: int) -> steady.Workload:
    """One micro-batch with its update; `sizes` are those of `GPT2`."""
    torch.manual_seed(0)
    model = GPT2(**sizes).train()
    ids, targets = next(stream(batch, tokens, model.tokens.num_embeddings))
    return steady.Workload.training(model, ids, loss_of, adamw, targets=targets)


def train(
    step: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
) -> list[Tensor]:
    """Trains for a number of updates; returns the losses of all micro-batches, on the device."""
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[Tensor] = []
    for ids, targets in batches:
        losses.append(step(ids, targets))
        if len(losses) % ACCUMULATE == 0:
            scheduler.step()
        if len(losses) == ACCUMULATE * steps:
            break
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="5m", help="time for the search without a stored plan")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)

    workload = factory().to("cuda" if torch.cuda.is_available() else "cpu")
    plan = steady.tune(workload, precision="bf16", budget=options.budget)

    model, (batch, tokens) = workload.model, workload.inputs[0].shape
    optimizer = adamw(model.parameters())
    step = plan.step(model, optimizer, loss_of, clip=CLIP, accumulate=ACCUMULATE)
    batches = plan.batches(stream(batch, tokens, model.tokens.num_embeddings), workload.device)
    losses = train(step, optimizer, batches, options.steps)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {options.steps} updates")
    print(step.report())


if __name__ == "__main__":
    main()
