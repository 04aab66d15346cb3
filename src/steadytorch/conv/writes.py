"""Detection of graph nodes that may write to tensors."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

_IN_PLACE = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "pow")}
_IN_PLACE |= {operator.setitem, operator.ifloordiv, operator.imod, operator.imatmul}


def may_write(node: fx.Node, modules: Mapping[str, Any]) -> bool:
    """Whether a node may write to one of its arguments; unknown operations count as writing.

    Args:
        node: a node of a traced graph.
        modules: layers of the graph, by name.
    """
    if node.op == "call_method":
        return str(node.target).endswith("_")  # also `__iadd__` and `__setitem__`
    if node.op == "call_module":
        module = modules[str(node.target)]
        known = type(module).__module__.startswith(("torch.nn.", "steadytorch.conv."))
        return bool(getattr(module, "inplace", False)) or not known or hooked(module)
    return node.op == "call_function" and _function_may_write(node)


def _function_may_write(node: fx.Node) -> bool:
    target: Any = node.target
    home = getattr(target, "__module__", None) or ""
    known = home.startswith(("torch", "_operator", "math", "builtins")) or home == ""
    named = getattr(target, "__name__", "")
    by_name = named.endswith("_") and not named.endswith("__")
    asked = "out" in node.kwargs or _asked_in_place(node)
    return target in _IN_PLACE or by_name or asked or not known or _is_said_to_write(target)


def _is_said_to_write(target: Any) -> bool:
    """Whether any overload of a `torch.ops` operator is declared mutable."""
    overloads = [target]
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    return any(isinstance(each, OpOverload) and each._schema.is_mutable for each in overloads)


def _asked_in_place(node: fx.Node) -> bool:
    """Whether a call passes `inplace=True`, by keyword or by position."""
    target: Any = node.target
    try:
        given = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a builtin has no signature
        given = node.kwargs
    return bool(given.get("inplace"))


def hooked(module: Any) -> bool:
    """Whether a layer has forward hooks, which may read or replace its input or output."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
