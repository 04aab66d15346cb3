"""Find convolutions whose values are too large for fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steadytorch.conv.module import EngineConv, engine_convolutions

HEADROOM = 16.0
"""Safety factor below fp16's largest number, for inputs with larger values."""
MOST = torch.finfo(torch.float16).max / HEADROOM


def beyond_fp16(model: nn.Module, run: Callable[[], Any]) -> set[str]:
    """Keys of convolutions with values that exceed fp16's range divided by `HEADROOM`.

    Input, residual, weight, bias and result of each call are checked; intermediate sums are kept in
    float32. The returned keys are valid only for the inputs of this run. Other inputs are checked
    by verification and, in production, by the canary.

    Args:
        model: a module from `rewrite`.
        run: calls the model.
    """
    found: set[str] = set()

    def look(module: EngineConv, given: tuple[Any, ...], result: Tensor) -> None:
        if module.problem is None:
            return
        tensors = [t for t in (*given, module.weight, module.bias, result) if t is not None]
        # Negated, so that NaN counts as too large.
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
