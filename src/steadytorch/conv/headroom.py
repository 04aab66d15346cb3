"""Which convolutions of a network have values that fp16 can hold with room to spare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steadytorch.conv.module import EngineConv, engine_convolutions

HEADROOM = 16.0
"""Values of other inputs may be this many times as large before fp16 overflows."""
MOST = torch.finfo(torch.float16).max / HEADROOM


def beyond_fp16(model: nn.Module, run: Callable[[], Any]) -> set[str]:
    """Problems, by key, of convolutions whose values come too near the end of fp16's range.

    Looked at are input, residual, weight, bias and result of each call; sums in between are kept in
    float32. It speaks for the inputs of this run alone: others are seen by verification and, in
    production, by the canary.

    Args:
        model: from `rewrite`.
        run: calls it.
    """
    found: set[str] = set()

    def look(module: EngineConv, given: tuple[Any, ...], result: Tensor) -> None:
        if module.problem is None:
            return
        tensors = [t for t in (*given, module.weight, module.bias, result) if t is not None]
        # So that NaN counts as beyond.
        if not all(float(torch.linalg.vector_norm(t, torch.inf)) <= MOST for t in tensors):
            found.add(module.problem.key)

    hooks = [each.register_forward_hook(look) for each in engine_convolutions(model)]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found
