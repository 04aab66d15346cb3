"""Finds module hooks and global hooks that other code than the model's might not call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

ON_ALL = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
"""PyTorch's registries of global module hooks; read only."""
ON_ALL_BACKWARD = (
    nn.modules.module._global_backward_pre_hooks,
    nn.modules.module._global_backward_hooks,
)
"""The same for backward passes."""
GRAPH_LACKS = "the model has hooks, which the traced graph would not call"
FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps its own forward and backward hooks."""

_OWN = "steadytorch."


def hooks_on_all(registries: Iterable[Mapping[Any, Any]] = ON_ALL) -> tuple[Any, ...]:
    """Return the global hooks of these registries, which run around every module or optimizer.

    This package's own hooks are left out, since they only observe: `benchmark_mode`, for example,
    counts the convolutions that PyTorch runs.
    """
    return tuple(
        hook
        for registry in registries
        for hook in registry.values()
        if not str(getattr(hook, "__module__", "")).startswith(_OWN)
    )


def hooks_of(module: nn.Module) -> list[Any]:
    """Return a module's own forward hooks; empty if a scripted module lacks hook attributes."""
    return [hook for name in FORWARD for hook in vars(module).get(name, {}).values()]


def is_hooked(module: nn.Module) -> bool:
    """Whether a forward hook, own or global, may see or replace a module's inputs or outputs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hooks_on_all())
