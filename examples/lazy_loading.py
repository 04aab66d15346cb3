"""Provokes lazy-loading: again and again a step needs a kernel that has not run before.

CUDA loads a kernel when it is first launched. `slow` meets a new combination of operator and type
in every call, as a server does whose rare branches come late. `mended` goes through all of them in
its first call. There are enough for two seconds; after that `slow` has met them all.

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
    """Takes the next branch, then multiplies matrices for some 50 ms."""

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
