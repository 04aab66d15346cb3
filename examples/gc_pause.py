"""Provokes gc-pause: a search links its nodes both ways, which creates garbage cycles.

`slow` makes thousands of objects per step in reference cycles. Reference counting cannot free them,
so the garbage collector runs within the step. `mended` stores the same tree as a list of indices,
without cycles.

    steady explain examples/gc_pause.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn


class Hypothesis:
    """A node with references to its parent and children."""

    def __init__(self, parent: Hypothesis | None) -> None:
        self.parent = parent
        self.children: list[Hypothesis] = []
        if parent is not None:
            parent.children.append(self)


class Search(nn.Module):
    """Builds a binary tree and does a little work on tensors."""

    def __init__(self, linked: bool) -> None:
        super().__init__()
        self.linked = linked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linked:
            nodes = [Hypothesis(None)]
            nodes.extend(Hypothesis(nodes[place // 2]) for place in range(3000))
            depth = len(nodes)
        else:
            parents = [-1]
            parents.extend(place // 2 for place in range(3000))
            depth = len(parents)
        return x.sum() + depth


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Search(linked=True), torch.ones(64)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Search(linked=False), torch.ones(64)
