"""Traces a model's `forward` with torch.fx, thread-safely and without changing the model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from steadytorch.errors import UnsupportedError
from steadytorch.rewrite.copying import copy_with
from steadytorch.workload.hooks import GRAPH_LACKS, is_hooked
from steadytorch.workload.opened import is_closed, opened
from steadytorch.workload.workload import Workload

_REPLACED = "the model's forward was replaced on the instance, which tracing would ignore"
_TRACING = threading.Lock()
"""torch.fx patches `nn.Module` while it traces; overlapping traces would leave it patched."""


def traced(workload: Workload) -> tuple[nn.Module, torch.fx.Graph]:
    """Trace the model's `forward` symbolically, without computing anything.

    Args:
        workload: must have an `nn.Module`; its inputs determine which optional arguments are set.

    Returns:
        A copy of the model that shares its tensors, and the graph of that copy.

    Raises:
        UnsupportedError: a container module has a hook, which tracing would call, or the model's
            `forward` was replaced on the instance.
        Exception: any exception that `forward` raises during tracing.
    """
    # A copy, because tracing runs forward, which may assign attributes.
    model = copy_with(workload.model, lambda tensor: tensor)
    return model, _trace(model, _constants(workload))


def traced_to_run(workload: Workload) -> tuple[nn.Module, torch.fx.Graph]:
    """Trace like `traced`, for callers that run the graph in place of the model.

    Raises:
        UnsupportedError: the model has a hook, which the graph would not call.
        Exception: see `traced`.
    """
    # A stored plan's model may have got hooks since.
    if is_hooked(workload.model):
        raise UnsupportedError(GRAPH_LACKS)
    return traced(workload)


def _trace(model: nn.Module, constants: dict[str, Any]) -> torch.fx.Graph:
    """Trace on this thread only; modules called by other threads run normally."""
    from torch import fx

    if "forward" in vars(model):
        raise UnsupportedError(_REPLACED)

    class ThreadTracer(fx.Tracer):
        thread = threading.get_ident()

        def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return forward(*args, **kwargs)
            if is_hooked(m) and not self.is_leaf_module(m, self.path_of_module(m)):
                raise UnsupportedError(GRAPH_LACKS)
            return super().call_module(m, forward, args, kwargs)

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            # A replaced `forward` must be traced: the class does not describe it.
            replaced = "forward" in vars(m)
            return not replaced and super().is_leaf_module(m, module_qualified_name)

        def create_arg(self, a: Any) -> Any:
            if not _would_change(a):
                return super().create_arg(a)
            leaves, make = _taken_apart(a)
            return self.create_proxy("call_function", make, tuple(leaves), {}).node

        def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
            if threading.get_ident() != self.thread:
                return attr_val
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    with _TRACING:
        return ThreadTracer().trace(model, concrete_args=constants)


def _would_change(value: Any) -> bool:
    """Whether torch.fx would reject a container, or convert it to another class."""
    known = type(value) in pytree.SUPPORTED_NODES and type(value) not in (tuple, list, dict)
    return known or is_closed(value)


def _taken_apart(container: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Return the leaves of a container, and a function that rebuilds the container from leaves."""
    leaves, structure = pytree.tree_flatten(opened(container))

    def make(*held: Any) -> Any:
        return pytree.tree_unflatten(held, structure)

    return leaves, make


def _constants(workload: Workload) -> dict[str, Any]:
    """Return the non-tensor arguments, defaults included, which select the branches to trace."""
    bound = inspect.signature(workload.model.forward).bind(*workload.inputs, **workload.kwargs)
    bound.apply_defaults()
    return {
        name: value
        for name, value in bound.arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
