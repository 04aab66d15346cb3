"""Provokes lazy-loading: many steps need a kernel that has not run before.

CUDA loads a kernel at its first launch. Each call of `slow` uses a new combination of operator and
type, like a server with rare branches. `mended` runs all combinations in its first call. They last
for two seconds; after that, `slow` has also run them all.

    steady explain examples/lazy_loading.py:slow --device cuda --budget 2s
"""

from __future__ import annotations

from itertools import product

import torch
from torch import nn

OPERATORS = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf"),
    *("erfc", "exp", "expm1", "floor", "frac", "log", "log10", "log1p", "log2", "logit", "neg"),
    *("reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square"),
    *("tan", "tanh", "trunc"),
)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BRANCHES = tuple(product(OPERATORS, TYPES))


class Rare(nn.Module):
    """Takes the next branch, then multiplies matrices for about 50 ms."""

    def __init__(self, warmed: bool) -> None:
        super().__init__()
        self.warmed, self.calls = warmed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.warmed and self.calls == 0:
            for branch in BRANCHES:
                take(branch, x.device)
        take(BRANCHES[self.calls % len(BRANCHES)], x.device)
        self.calls += 1
        for _ in range(30):
            y = x @ x
        return y


def take(branch: tuple[str, torch.dtype], device: torch.device) -> torch.Tensor:
    name, dtype = branch
    return getattr(torch, name)(torch.ones(256, dtype=dtype, device=device))


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Rare(warmed=False), torch.randn(8192, 8192, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Rare(warmed=True), torch.randn(8192, 8192, dtype=torch.bfloat16)
