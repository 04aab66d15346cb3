"""Fuses pointwise, depthwise and few-channel convolutions and Linears with adjacent operations."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.conv.writes import may_write
from steadytorch.kernels.activated_linear import activated_linear
from steadytorch.kernels.depthwise_conv import channels_innermost, depthwise_conv2d
from steadytorch.kernels.pointwise_conv import pointwise_conv2d
from steadytorch.kernels.small_channel_conv import is_thin, thin_conv2d
from steadytorch.rewrite.copying import copy_with
from steadytorch.rewrite.fusible import ADDS, Layers
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

Seen = Mapping[torch.fx.Node, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor that a graph's nodes return."""

_LAYERS = {
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardswish: "hardswish",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
}
_FUNCTIONS = {
    **{getattr(F, name): name for name in _LAYERS.values()},
    **dict.fromkeys((torch.relu, torch.relu_, F.relu_), "relu"),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_), "sigmoid"),
}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
"""By the `approximate` argument."""
_METHODS = {"relu": "relu", "relu_": "relu", "sigmoid": "sigmoid", "sigmoid_": "sigmoid"}
_PRODUCTS = (operator.mul, torch.mul)
_DROPOUTS = (nn.Dropout, nn.Dropout2d)
MOST_INTENSE = 160
"""Highest arithmetic intensity, in operations per byte, at which a Linear is fused.

A Linear with R rows does 2 * R * in * out operations and moves R * (in + out) 16-bit elements,
weight excluded: in * out / (in + out) operations per byte. An H200 does about 790 TFLOP/s at
4.3 TB/s, 184 operations per byte. Below that, memory is the bottleneck, and fusion saves a full
write and read of the result. Above it, the saving shrinks and the library's arithmetic rate wins.

Expansions by four: 96 channels have 77, 192 have 154, 384 have 307, and 768 have 614.
"""


class Separable(NamedTuple):
    """A pointwise, depthwise or few-channel convolution or a Linear, and the nodes fused with it.

    Attributes:
        layer: the convolution or the Linear.
        after: the nodes after it, in order: identities, then an activation or a sum.
        activation: name of the activation; "" for none.
        product: the product of the layer's input and a gate; None without a gate.
        gate: index of the gate among the product's two factors.
        add: the node of the sum at the end of `after`, or None.
    """

    layer: torch.fx.Node
    after: tuple[torch.fx.Node, ...] = ()
    activation: str = ""
    product: torch.fx.Node | None = None
    gate: int = 0
    add: torch.fx.Node | None = None

    @property
    def nodes(self) -> tuple[torch.fx.Node, ...]:
        """All nodes that the fused operator replaces, in graph order."""
        return (*(() if self.product is None else (self.product,)), self.layer, *self.after)


def separables(
    layers: Layers, workload: Workload, folded: Set[str], taken: Set[torch.fx.Node]
) -> Iterator[Separable]:
    """Yield each layer that can be fused, with the nodes that fuse with it.

    Pointwise convolutions on one-pixel images (as in squeeze-and-excitation) or without an adjacent
    operation to fuse are skipped. Few-channel convolutions without an activation are skipped.

    A Linear needs an activation and an arithmetic intensity of at most `MOST_INTENSE`. A Linear
    also needs at least as many rows as its intensity: with fewer rows, reading the weight
    dominates.

    Args:
        layers: the model and its graph.
        workload: its inputs determine the shapes.
        folded: names of batch norms that will be folded into their convolution.
        taken: nodes that other fusions already use.

    Raises:
        Exception: the model's control flow depends on values, not only on shapes.
    """
    nodes = [node for node in layers.nodes if node not in taken and _is_separable(layers, node)]
    finder = _Finder(layers, _seen(layers, workload) if nodes else {}, folded, taken)
    sums: set[torch.fx.Node] = set()
    for node in nodes:
        found = finder.found(node, sums)
        if found is not None:
            sums.update(() if found.add is None else (found.add,))
            yield found


def put(model: nn.Module, graph: torch.fx.Graph, found: Separable) -> None:
    """Replace the nodes of a match by one fused operator, in place.

    Args:
        model: the module that the graph refers to. A depthwise convolution gets its own weight, in
            the layout that the operator reads.
        graph: the graph to change.
        found: a match of `separables`, after batch norms were folded.
    """
    name, (source, *_) = str(found.layer.target), found.layer.args
    layer: Any = model.get_submodule(name)
    gate = other = None
    if found.product is not None:
        source, gate = found.product.args[1 - found.gate], found.product.args[found.gate]
    if found.add is not None:
        summed = found.nodes[-2]
        (other,) = (term for term in found.add.args if term is not summed)
    last = found.nodes[-1]
    with graph.inserting_before(last):
        weight = graph.get_attr(f"{name}.weight")
        bias = None if layer.bias is None else graph.get_attr(f"{name}.bias")
        if type(layer) is nn.Linear:
            given = (source, weight, bias, found.activation)
            fused = graph.call_function(activated_linear, given)
        elif layer.groups == 1 and is_thin(layer.weight.shape):
            geometry = (layer.stride, layer.padding, layer.dilation)
            given = (source, weight, bias, *geometry, found.activation)
            fused = graph.call_function(thin_conv2d, given)
        elif layer.groups == 1:
            given = (source, weight, bias, found.activation, gate, other)
            fused = graph.call_function(pointwise_conv2d, given)
        else:
            with torch.inference_mode(False), torch.no_grad():
                packed = channels_innermost(layer.weight.detach())
            layer.weight = nn.Parameter(packed, layer.weight.requires_grad)
            geometry = (layer.stride, layer.padding, layer.dilation)
            given = (source, weight, bias, *geometry, found.activation)
            fused = graph.call_function(depthwise_conv2d, given)
    last.replace_all_uses_with(fused)
    for node in reversed(found.nodes):
        graph.erase_node(node)


def _seen(layers: Layers, workload: Workload) -> Seen:
    """Run the graph on meta tensors to find the shapes and dtypes of its values."""
    seen: dict[torch.fx.Node, tuple[torch.Size, torch.dtype]] = {}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    class Shapes(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            # Tensors that the model creates or keeps as attributes are not on meta yet.
            result = map_tensors(empty, super().run_node(n))
            if isinstance(result, torch.Tensor):
                seen[n] = (result.shape, result.dtype)
            return result

    bound = inspect.signature(layers.model.forward).bind(*workload.inputs, **workload.kwargs)
    bound.apply_defaults()
    values = map_tensors(empty, [*bound.args, *bound.kwargs.values()])
    with torch.no_grad():
        Shapes(copy_with(layers.model, empty), graph=layers.graph).run(*values)
    return seen


class _Finder:
    """Finds the nodes to fuse with a layer; `folded` and `taken` are as in `separables`."""

    def __init__(
        self, layers: Layers, seen: Seen, folded: Set[str], taken: Set[torch.fx.Node]
    ) -> None:
        self._layers, self._seen, self._folded, self._taken = layers, seen, folded, taken
        self._order = {node: place for place, node in enumerate(layers.nodes)}

    def found(self, node: torch.fx.Node, sums: Set[torch.fx.Node]) -> Separable | None:
        """Return the fusion match for a layer, or None; the nodes in `sums` are already fused."""
        layer, shape = self._layers.called(node), self._seen[node][0]
        if type(layer) is nn.Linear:
            found = self._activated(Separable(node))
            return (
                found
                if found.activation and _is_bound_by_memory(layer, shape[:-1].numel())
                else None
            )
        if len(shape) != 4:
            return None
        found = self._activated(Separable(node))
        if layer.groups > 1:
            return found
        if is_thin(layer.weight.shape):
            return found if found.activation else None
        if not found.activation:
            found = self._summed(found, sums)
        found = self._gated(found)
        fused = found.activation or found.add is not None or found.product is not None
        return found if fused and shape[2:].numel() > 1 else None

    def _activated(self, found: Separable) -> Separable:
        while (user := _sole_user(found.nodes[-1])) is not None and user not in self._taken:
            name = self._activation(user)
            further = found._replace(after=(*found.after, user), activation=name)
            if not (name or self._is_idle(user)) or not self._is_quiet(further):
                break
            found = further
            if name:
                break
        return found

    def _summed(self, found: Separable, sums: Set[torch.fx.Node]) -> Separable:
        last = found.nodes[-1]
        add = _sole_user(last)
        if add is None or add in sums or add.kwargs or len(add.args) != 2:
            return found
        known = add.op == "call_function" and add.target in ADDS
        known = known or (add.op == "call_method" and add.target in ("add", "add_"))
        # An in-place sum into the other operand may be visible elsewhere.
        in_place = add.target in (operator.iadd, "add_")
        if not known or (in_place and add.args[0] is not last):
            return found
        alike = len(add.all_input_nodes) == 2 and self._are_alike(*add.all_input_nodes)
        further = found._replace(after=(*found.after, add), add=add)
        return further if alike and self._is_quiet(further) else found

    def _gated(self, found: Separable) -> Separable:
        product = found.layer.all_input_nodes[0]
        known = product.op == "call_function" and product.target in _PRODUCTS
        known = known or (product.op == "call_method" and product.target == "mul")
        factors = product.all_input_nodes
        alone = len(product.users) == 1 and len(product.args) == len(factors) == 2
        if not known or not alone or product.kwargs:
            return found
        for gate, whole in ((0, 1), (1, 0)):
            scaled = self._are_alike(factors[whole], product)
            if scaled and self._is_gate(factors[gate], product):
                further = found._replace(product=product, gate=gate)
                return further if self._is_quiet(further) else found
        return found

    def _is_gate(self, gate: torch.fx.Node, product: torch.fx.Node) -> bool:
        shape, dtype = self._seen[product]
        return self._seen.get(gate) == (torch.Size((*shape[:2], 1, 1)), dtype)

    def _are_alike(self, first: torch.fx.Node, second: torch.fx.Node) -> bool:
        return self._seen.get(first) == self._seen.get(second) is not None

    def _activation(self, node: torch.fx.Node) -> str:
        """Return the name of the activation that a node computes; "" if none."""
        called: Any = self._layers.called(node)
        if len(node.all_input_nodes) != 1 or not set(node.kwargs) <= {"inplace", "approximate"}:
            return ""
        if type(called) is nn.GELU:
            return _GELUS.get(called.approximate, "")
        if called is F.gelu:
            return _GELUS.get(str(node.kwargs.get("approximate", "none")), "")
        if node.op == "call_module":
            return _LAYERS.get(type(called), "")
        names = _METHODS if node.op == "call_method" else _FUNCTIONS
        return names.get(called, "") if node.op.startswith("call_") else ""

    def _is_idle(self, node: torch.fx.Node) -> bool:
        if len(node.all_input_nodes) != 1:
            return False
        if node.op == "call_module" and str(node.target) in self._folded:
            return True
        called: Any = self._layers.called(node)
        if node.op == "call_module" and type(called) in _DROPOUTS:
            return not called.training
        return self._layers.is_idle(node) or _is_idle_depth(node)

    def _is_quiet(self, found: Separable) -> bool:
        """Whether no other node writes to a tensor between the first and last node of a match.

        The fused operator replaces the last node, so it reads all inputs of the match at that
        point.
        """
        first, last = self._order[found.nodes[0]], self._order[found.nodes[-1]]
        between = [n for n in self._layers.nodes[first:last] if n not in found.nodes]
        return not any(may_write(node, self._layers.modules) for node in between)


def _is_separable(layers: Layers, node: torch.fx.Node) -> bool:
    """Whether a node calls a layer of a kind that `separables` can fuse."""
    layer: Any = layers.called(node)
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    if type(layer) not in (nn.Linear, nn.Conv2d):
        return False
    # Tensor subclasses may override the layer's operation.
    if any(type(tensor) is not nn.Parameter for tensor in layer.parameters()):
        return False
    if type(layer) is nn.Linear:
        return _is_bound_by_memory(layer)
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return False
    if layer.groups > 1:
        return layer.groups == layer.in_channels == layer.out_channels
    if is_thin(layer.weight.shape):
        return True
    return (layer.kernel_size, layer.stride, layer.padding) == ((1, 1), (1, 1), (0, 0))


def _is_bound_by_memory(linear: nn.Linear, rows: int = MOST_INTENSE) -> bool:
    """Whether reading inputs and writing outputs dominates the time of a Linear."""
    inputs, outputs = linear.in_features, linear.out_features
    return inputs * outputs <= min(rows, MOST_INTENSE) * (inputs + outputs)


def _is_idle_depth(node: torch.fx.Node) -> bool:
    """Whether a node is torchvision's stochastic depth in evaluation mode, an identity."""
    home, name = (getattr(node.target, of, None) or "" for of in ("__module__", "__name__"))
    known = name == "stochastic_depth" and home.startswith("torchvision.")
    return known and node.args[3:] == (False,) and not node.kwargs


def _sole_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
