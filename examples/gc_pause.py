"""Provokes gc-pause: a search links its hypotheses both ways, and the cycles are garbage.

`slow` makes thousands of objects a step that refer to each other in circles. Python's counting of
references cannot free them, so the collector runs within the step. `mended` keeps the same tree in
one list of indices, in which there is nothing to collect.

    steady explain examples/gc_pause.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn


class Hypothesis:
    """A node that knows its parent and its children."""

    def __init__(self, parent: Hypothesis | None) -> None:
        self.parent = parent
        self.children: list[Hypothesis] = []
        if parent is not None:
            parent.children.append(self)


class Search(nn.Module):
    """Grows a binary tree beside a little work on tensors."""

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
