"""Tracing a model's `forward` with torch.fx, beside other threads, the model left untouched."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from steadytorch.errors import UnsupportedError
from steadytorch.rewrite.copying import copy_with
from steadytorch.rewrite.hooks import GRAPH_LACKS, is_hooked
from steadytorch.workload.workload import Workload

_REPLACED = "the model's forward was replaced, and tracing would pass that by"
_TRACING = threading.Lock()
"""torch.fx patches `nn.Module` while it traces: two traces that overlap would leave it patched."""


def traced(workload: Workload) -> tuple[nn.Module, torch.fx.Graph]:
    """Traces the model's `forward` with symbols; no arithmetic is done.

    Args:
        workload: one with an `nn.Module`; its inputs decide which optional arguments are given.

    Returns:
        A copy of the model that shares its tensors, and the graph of that copy.

    Raises:
        UnsupportedError: a module that calls others has a hook, which tracing would call, or the
            model a `forward` of its own beside that of its class.
        Exception: whatever the model's `forward` raises when traced with symbols.
    """
    # Tracing runs forward, and forward may assign attributes: let it do so on a copy.
    model = copy_with(workload.model, lambda tensor: tensor)
    return model, _trace(model, _constants(workload))


def traced_to_run(workload: Workload) -> tuple[nn.Module, torch.fx.Graph]:
    """As `traced`, for who runs the graph in the place of the model.

    Raises:
        UnsupportedError: the model has a hook, which the graph lacks.
        Exception: as `traced`.
    """
    # Those of a stored plan's model may be new.
    if is_hooked(workload.model):
        raise UnsupportedError(GRAPH_LACKS)
    return traced(workload)


def _trace(model: nn.Module, constants: dict[str, Any]) -> torch.fx.Graph:
    """Traces on this thread alone; modules that others call meanwhile run as ever."""
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
            # One whose `forward` was replaced computes that, and not what its class says.
            replaced = "forward" in vars(m)
            return not replaced and super().is_leaf_module(m, module_qualified_name)

        def create_arg(self, a: Any) -> Any:
            if type(a) is OrderedDict:  # which a graph would make a plain dictionary of
                pairs = [(key, value) for key, value in a.items()]
                return self.create_proxy("call_function", OrderedDict, (pairs,), {}).node
            return super().create_arg(a)

        def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
            if threading.get_ident() != self.thread:
                return attr_val
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    with _TRACING:
        return ThreadTracer().trace(model, concrete_args=constants)


def _constants(workload: Workload) -> dict[str, Any]:
    """The arguments that are no tensors, defaults included: they decide which branch is traced."""
    bound = inspect.signature(workload.model.forward).bind(*workload.inputs, **workload.kwargs)
    bound.apply_defaults()
    return {
        name: value
        for name, value in bound.arguments.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
