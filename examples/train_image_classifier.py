"""Trains ResNet-18 on augmented images with SGD and OneCycleLR, a plan's whole step at a time.

The images are random; put your own dataset in their place.

    steady tune examples/train_image_classifier.py:factory --precision bf16
    python examples/train_image_classifier.py --budget 3m --steps 200
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import steadytorch as steady
from steadytorch.workload import bundled

CLASSES = 1000
PADDING = 16
RATE = 0.1
"""Highest learning rate of the cycle."""

sgd = partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=1e-4)


class Augmented(Dataset):
    """Random images with labels; each access flips and crops one anew."""

    def __init__(self, count: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (count, 3, size, size)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, size = self.images[index] / 127.5 - 1, self.images.shape[-1]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        top, left = torch.randint(2 * PADDING + 1, (2,)).tolist()
        padded = F.pad(image, (PADDING,) * 4)
        return padded[:, top : top + size, left : left + size], self.labels[index]


def factory(batch: int = 64, size: int = 224, count: int = 512) -> steady.Workload:
    """One training step; the plan covers the loader too."""
    torch.manual_seed(0)
    model = bundled.build("resnet18").train()
    loader = DataLoader(Augmented(count, size), batch, shuffle=True, drop_last=True)
    return steady.Workload.from_loader(model, loader, F.cross_entropy, sgd)


def train(
    step: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
) -> list[Tensor]:
    """Trains for a number of steps; returns their losses, which are still on the device."""
    # Graphs read a new learning rate at each replay, but hold the momentum: with one that changes
    # at every step, updates would run eagerly.
    scheduler = OneCycleLR(optimizer, max_lr=RATE, total_steps=steps, cycle_momentum=False)
    losses: list[Tensor] = []
    while True:
        for images, labels in batches:
            losses.append(step(images, labels))
            if len(losses) == steps:
                return losses
            scheduler.step()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="3m", help="time for the search without a stored plan")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)

    workload = factory().to("cuda" if torch.cuda.is_available() else "cpu")
    plan = steady.tune(workload, precision="bf16", budget=options.budget)

    assert workload.feed is not None  # made from a loader
    model, loader = workload.model, workload.feed.loader
    optimizer = sgd(model.parameters())
    step = plan.step(model, optimizer, F.cross_entropy)
    losses = train(step, optimizer, plan.batches(loader, workload.device), options.steps)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {options.steps} steps")
    print(step.report())


if __name__ == "__main__":
    main()
