"""A mode that sees which functions of PyTorch are called."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Watch(TorchFunctionMode):
    """Records every function call in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
