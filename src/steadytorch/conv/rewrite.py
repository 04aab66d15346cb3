"""Fuse convolutions with their batch norm, bias, residual add and ReLU, in a torch.fx graph.

For inference only. Fusion changes results only by rounding. A convolution is fused with later
operations only if each intermediate value has one reader, and shapes and dtypes agree. Unfused
operations between the first and the last fused operation must not write to tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from steadytorch.conv.executables import Geometry, problem_of
from steadytorch.conv.module import EngineConv, convolves, layer_geometry, misfit, objection
from steadytorch.conv.problem import ConvProblem
from steadytorch.conv.writes import hooked, may_write
from steadytorch.errors import SteadyError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ADDS = (operator.add, operator.iadd, torch.add)
_FUNCTIONS = {getattr(F, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)}
_RELUS = (F.relu, torch.relu, torch.relu_, F.relu_)
_SEEN = "steadytorch_seen"


class _Found(NamedTuple):
    """A convolution and the nodes that can be fused into it; `last` produces the result."""

    conv: fx.Node
    norm: fx.Node | None
    add: fx.Node | None
    other: fx.Node | None
    relu: fx.Node | None

    @property
    def last(self) -> fx.Node:
        return self.relu or self.add or self.norm or self.conv

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in (self.conv, self.norm, self.add, self.relu) if n is not None)


def rewrite(
    traced: fx.GraphModule, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.GraphModule:
    """Fuse the convolutions of a traced model with the operations that follow them, in place.

    Runs the model once without gradients, to record shapes, dtypes and layouts.

    Args:
        traced: a model in evaluation mode with layers as `call_module` nodes. Its modules must not
            be shared. Its tensors may be shared; they are not written to.
        inputs: positional arguments; the result holds for their shapes and layouts.
        kwargs: keyword arguments, likewise.

    Returns: `traced`, with eligible convolutions replaced by `EngineConv`. They run PyTorch's
    implementation until engines are chosen (`module.use`).
    """
    _Recorder(traced).record(inputs, kwargs)
    _drop_identities(traced)
    for number, found in enumerate(list(_find(traced))):
        _replace(traced, found, f"steady_conv_{number}")
    traced.graph.lint()
    traced.recompile()
    traced.delete_all_unused_submodules()
    return traced


def left_out(model: nn.Module) -> dict[str, list[str]]:
    """List the convolutions of a rewritten model that cuDNN engines cannot run.

    Args:
        model: a model from `rewrite`, or one that contains such a module.

    Returns:
        Layer names by reason; for function calls, the names of graph nodes.
    """
    found: dict[str, list[str]] = {}
    graphs = [module for module in model.modules() if isinstance(module, fx.GraphModule)]
    for traced in graphs:
        modules = dict(traced.named_modules())
        for node in traced.graph.nodes:
            label, reason = _left_out(node, modules)
            if reason is not None:
                found.setdefault(reason, []).append(label)
    return found


def _left_out(node: fx.Node, modules: Mapping[str, Any]) -> tuple[str, str | None]:
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return node.name, "a call of a function: engines are for layers"
    module = modules[str(node.target)] if node.op == "call_module" else None
    if isinstance(module, EngineConv):
        return module.label, module.reason
    return str(node.target), _objection(node, modules) if convolves(module) else None


class _Recorder(fx.Interpreter):
    """Runs a graph and stores a meta tensor of each node's result in `node.meta`."""

    def record(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.run(*_placed(self.module, inputs, kwargs))

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta.pop(_SEEN, None)
        if isinstance(result, Tensor) and result.layout is torch.strided:
            n.meta[_SEEN] = torch.empty_strided(
                result.shape, result.stride(), dtype=result.dtype, device="meta"
            )
        return result


def _placed(module: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Argument values for the graph's placeholders, in order."""
    waiting, placed = list(inputs), []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target)
        if name.startswith("**"):
            placed.append({})
        elif waiting:
            placed.append(waiting.pop(0))
        else:
            default = node.args[0] if node.args else None
            placed.append(kwargs.get(name, default))
    return placed


def _drop_identities(traced: fx.GraphModule) -> None:
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        module = modules[str(node.target)]
        idle = type(module) is nn.Identity or (type(module) in _DROPOUTS and not module.training)
        if idle and not hooked(module) and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _find(traced: fx.GraphModule) -> Iterator[_Found]:
    """Yield each eligible convolution with the longest chain of nodes that can be fused."""
    modules = dict(traced.named_modules())
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    nodes, taken = list(order), set()
    for conv in nodes:
        if conv.op != "call_module" or _objection(conv, modules) is not None:
            continue
        norm = _norm_after(conv, modules)
        add, other = _add_after(norm or conv, order, taken)
        relu = _relu_after(add or norm or conv, modules)
        candidates = (
            _Found(conv, norm, add, other, relu),
            _Found(conv, norm, None, None, _relu_after(norm or conv, modules)),
            _Found(conv, norm, None, None, None),
        )
        for found in candidates:
            if found.last is conv or _quiet(found, nodes, order, modules):
                taken.update(found.nodes)
                yield found
                break
        else:
            yield _Found(conv, None, None, None, None)


def _objection(node: fx.Node, modules: Mapping[str, Any]) -> str | None:
    """Reason why a module call cannot be replaced by `EngineConv`; None if it can."""
    module, seen = modules[str(node.target)], node.meta.get(_SEEN)
    if (reason := objection(module)) is not None:
        return reason
    if len(node.args) != 1 or node.kwargs:
        return "a call with more arguments than the input"
    if hooked(module):
        return "a hook"
    source = node.args[0]
    x = source.meta.get(_SEEN) if isinstance(source, fx.Node) else None
    if seen is None or x is None:
        return "an input or a result that is not a dense tensor"
    if seen.dtype != x.dtype:
        return f"an input of {x.dtype} with a result of {seen.dtype}"
    return misfit(x, module.weight)


def _norm_after(node: fx.Node, modules: Mapping[str, Any]) -> fx.Node | None:
    user = _sole_user(node)
    if user is None or user.op != "call_module" or user.kwargs or user.args != (node,):
        return None
    norm: Any = modules[str(user.target)]
    fixed = type(norm) in _BATCH_NORMS and not norm.training and norm.running_var is not None
    return user if fixed and not hooked(norm) else None


def _add_after(
    node: fx.Node, order: dict[fx.Node, int], taken: set[fx.Node]
) -> tuple[fx.Node | None, fx.Node | None]:
    """Find the addition of `node` to a tensor of equal shape and dtype; return both nodes."""
    user = _sole_user(node)
    if user is None or user in taken or user.kwargs or len(user.args) != 2:
        return None, None
    is_add = (user.op == "call_function" and user.target in _ADDS) or (
        user.op == "call_method" and user.target in ("add", "add_")
    )
    first, second = user.args
    if not is_add or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None, None
    writes = user.target in (operator.iadd, "add_")
    other = second if first is node else first
    # An in-place add into the other operand writes to a tensor that may be read elsewhere.
    if other is node or (writes and first is not node):
        return None, None
    here, there = node.meta.get(_SEEN), other.meta.get(_SEEN)
    agree = (
        here is not None
        and there is not None
        and here.shape == there.shape
        and here.dtype == there.dtype
    )
    return (user, other) if agree and order[other] < order[user] else (None, None)


def _relu_after(node: fx.Node, modules: Mapping[str, Any]) -> fx.Node | None:
    user = _sole_user(node)
    if user is None or user.args[:1] != (node,) or len(user.args) > 1:
        return None
    if user.op == "call_module":
        module = modules[str(user.target)]
        return user if type(module) is nn.ReLU and not hooked(module) else None
    if user.op == "call_function":
        plain = set(user.kwargs) <= {"inplace"}
        return user if user.target in _RELUS and plain else None
    return user if user.op == "call_method" and user.target in ("relu", "relu_") else None


def _sole_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _quiet(
    found: _Found, nodes: list[fx.Node], order: dict[fx.Node, int], modules: Mapping[str, Any]
) -> bool:
    """Whether no unfused node from the convolution to the last fused node may write to a tensor.

    The fused operator runs at the position of the last fused node, so its input must not change
    before.
    """
    between = nodes[order[found.conv] + 1 : order[found.last]]
    return not any(may_write(node, modules) for node in between if node not in found.nodes)


def _replace(traced: fx.GraphModule, found: _Found, name: str) -> None:
    conv: Any = traced.get_submodule(str(found.conv.target))
    weight, bias = conv.weight, conv.bias
    if found.norm is not None:
        weight, bias = _folded(weight, bias, traced.get_submodule(str(found.norm.target)))
    if bias is None and (found.add is not None or found.relu is not None):
        # cuDNN has precompiled engines for these epilogues only with a bias.
        bias = weight.detach().new_zeros(weight.shape[0])
    geometry = layer_geometry(conv)
    assert geometry is not None
    source: Any = found.conv.args[0]
    label, relu = str(found.conv.target), found.relu is not None
    posed = _problem(source, weight, bias is not None, found, geometry)
    # Read the residual from the add: the node found earlier may have been replaced since.
    summed = found.norm or found.conv
    read = () if found.add is None else found.add.args
    traced.add_submodule(name, EngineConv(weight, bias, geometry, relu, label, *posed))
    arguments = (source, *[argument for argument in read if argument is not summed])
    with traced.graph.inserting_before(found.last):
        fused = traced.graph.call_module(name, arguments)
    fused.meta[_SEEN] = found.last.meta.get(_SEEN)
    found.last.replace_all_uses_with(fused)
    for node in reversed(found.nodes):
        traced.graph.erase_node(node)


def _problem(
    source: fx.Node, weight: Tensor, biased: bool, found: _Found, geometry: Geometry
) -> tuple[ConvProblem | None, str | None]:
    """Return the convolution problem, or the reason why engines do not support it."""
    seen: Tensor = source.meta[_SEEN]
    stored = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    fused = (biased, found.other is not None, found.relu is not None)
    try:
        return problem_of(seen, stored, *fused, geometry), None
    except SteadyError as error:
        return None, str(error)


def _folded(weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Fold a batch norm into the convolution's weight and bias, in float64, rounded once."""
    with torch.inference_mode(False), torch.no_grad():
        wide = [
            None if t is None else t.detach().double()
            for t in (weight, bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        ]
        w, b, mean, var, gamma, beta = wide
        assert w is not None
        assert mean is not None
        assert var is not None
        scale = (var + norm.eps).rsqrt() * (1.0 if gamma is None else gamma)
        shift = (0.0 if beta is None else beta) + ((0.0 if b is None else b) - mean) * scale
        folded = (w * scale.view(-1, *[1] * (w.dim() - 1))).to(weight.dtype)
        return torch.empty_like(weight).copy_(folded), shift.to(weight.dtype)
