"""Provokes recompilation: every request has a new length and is compiled again.

`slow` compiles for exact sizes (`dynamic=False`), without a recompilation limit. `mended` compiles
once for dynamic sizes (`dynamic=True`). The backend `eager` keeps the example fast. Compiling
creates many objects, so gc-pause and allocation-in-loop may be found too.

    steady explain examples/recompilation.py:slow --device cpu
"""

from __future__ import annotations

import torch
from torch import nn

LONGEST = 4096


class Requests(nn.Module):
    """Uses one element less of its input at each call, down to two."""

    def __init__(self, dynamic: bool) -> None:
        super().__init__()
        self.dynamic = dynamic
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == 0:
            torch._dynamo.config.recompile_limit = LONGEST
            torch._dynamo.config.accumulated_recompile_limit = LONGEST
            self.run = torch.compile(normalised, backend="eager", dynamic=self.dynamic)
        self.calls += 1
        return self.run(x[: LONGEST - self.calls % (LONGEST - 2)])


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / (x.std() + 1.0)


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Requests(dynamic=False), torch.ones(LONGEST)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Requests(dynamic=True), torch.ones(LONGEST)
