"""Hooks on modules, of one or of all: what runs in the place of a model may not call them."""

from __future__ import annotations

from typing import Any

from torch import nn

ON_ALL = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
"""PyTorch's own registries of hooks on every module of the process; for reading."""
GRAPH_LACKS = "the model has hooks, which a graph lacks"
FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
"""Where a module has its own: hooks that its calls run, and that passes back through it run."""

_OWN = "steadytorch."


def hooks_on_all() -> tuple[Any, ...]:
    """Hooks that run around every module of the process.

    This package's own are left out: they look on, and miss nothing in a graph (`benchmark_mode`
    counts the convolutions that PyTorch runs).
    """
    return tuple(
        hook
        for registry in ON_ALL
        for hook in registry.values()
        if not str(getattr(hook, "__module__", "")).startswith(_OWN)
    )


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's own hooks around its calls; a scripted one need not have a place for them."""
    return [hook for name in FORWARD for hook in vars(module).get(name, {}).values()]


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook may look at, or replace, what goes into a module or comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hooks_on_all())
