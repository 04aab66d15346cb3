"""Convolutions of pixels, channels and images, and Linears: one operator with what is around."""

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
from steadytorch.kernels.thin_conv import is_thin, thin_conv2d
from steadytorch.rewrite.copying import copy_with
from steadytorch.rewrite.fusible import ADDS, Layers
from steadytorch.workload.signature import map_tensors
from steadytorch.workload.workload import Workload

Seen = Mapping[torch.fx.Node, tuple[torch.Size, torch.dtype]]
"""Shapes and element types of the tensors that a graph's nodes give."""

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
"""By the formula that is asked for."""
_METHODS = {"relu": "relu", "relu_": "relu", "sigmoid": "sigmoid", "sigmoid_": "sigmoid"}
_PRODUCTS = (operator.mul, torch.mul)
_DROPOUTS = (nn.Dropout, nn.Dropout2d)
MOST_INTENSE = 160
"""Multiplications for each element that a product moves, up to which a Linear is taken.

A product of R rows multiplies R * in * out times, two operations each, and moves R * (in + out)
elements of two bytes besides its weight: in * out / (in + out) operations a byte. An H200 has about
790 TFLOP/s for 4.3 TB/s, 184 operations a byte: where there are fewer, memory takes longer than the
arithmetic, and the result that is not written and read once more counts in full. From there on it
counts less and less, and the rate of the arithmetic, a library's strength, more. Widened by four,
96 and 192 channels have 77 and 154, 384 and 768 have 307 and 614.
"""


class Separable(NamedTuple):
    """A pointwise, depthwise or thin convolution or a Linear, and what one operator does with it.

    Attributes:
        layer: the convolution, or the Linear.
        after: what its result goes to, one after the other: layers that do nothing, then an
            activation or a sum.
        activation: its name; "" for none.
        product: of the layer's input and a gate; None where it is not gated.
        gate: which of the product's two factors is the gate.
        add: the sum that is the last of `after`, or None.
    """

    layer: torch.fx.Node
    after: tuple[torch.fx.Node, ...] = ()
    activation: str = ""
    product: torch.fx.Node | None = None
    gate: int = 0
    add: torch.fx.Node | None = None

    @property
    def nodes(self) -> tuple[torch.fx.Node, ...]:
        """All that the operator stands for, in the order of the graph."""
        return (*(() if self.product is None else (self.product,)), self.layer, *self.after)


def separables(
    layers: Layers, workload: Workload, folded: Set[str], taken: Set[torch.fx.Node]
) -> Iterator[Separable]:
    """Each layer that one operator can stand for, with all that this one takes along.

    Pointwise convolutions on images of one pixel, as of squeeze-and-excitation, are left alone, and
    so are those with nothing around them to be taken along, and those of few channels without an
    activation. Linears are taken with an activation, up to `MOST_INTENSE`, and of more rows than
    multiplications for each element: of fewer it is the weight that takes time to read.

    Args:
        layers: the model and its graph.
        workload: gives the inputs; what holds for their shapes is found.
        folded: names of batch norms that are to be folded into the convolution before them.
        taken: nodes that are no longer to be had.

    Raises:
        Exception: whatever comes of values, not of shapes, deciding what the model computes.
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
    """Puts the operator in the place of all that it stands for.

    Args:
        model: what the graph refers to. A depthwise convolution gets a weight of its own, laid out
            as the operator reads it.
        graph: to be changed.
        found: of `separables` for the two; batch norms that were to be folded have been.
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
    """Runs the graph on tensors without contents, for the shapes of what its nodes give."""
    seen: dict[torch.fx.Node, tuple[torch.Size, torch.dtype]] = {}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    class Shapes(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            # What the model makes, or keeps as an attribute, is elsewhere.
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
    """Looks at the surroundings of single layers; arguments as of `separables`."""

    def __init__(
        self, layers: Layers, seen: Seen, folded: Set[str], taken: Set[torch.fx.Node]
    ) -> None:
        self._layers, self._seen, self._folded, self._taken = layers, seen, folded, taken
        self._order = {node: place for place, node in enumerate(layers.nodes)}

    def found(self, node: torch.fx.Node, sums: Set[torch.fx.Node]) -> Separable | None:
        """What a layer takes along, or None; `sums` have found theirs."""
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
        # Written into the other one, a sum may be seen by others.
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
        """The name of the activation that a node computes of its first argument; "" if none."""
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
        """Whether nothing writes to a tensor between the first and the last of these nodes.

        The operator stands where the last one stood, and there reads what all of them did.
        """
        first, last = self._order[found.nodes[0]], self._order[found.nodes[-1]]
        between = [n for n in self._layers.nodes[first:last] if n not in found.nodes]
        return not any(may_write(node, self._layers.modules) for node in between)


def _is_separable(layers: Layers, node: torch.fx.Node) -> bool:
    """Whether it calls a plain layer of one kind or another."""
    layer: Any = layers.called(node)
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    if type(layer) not in (nn.Linear, nn.Conv2d):
        return False
    # Tensors of other types may have their own idea of what such a layer does with them.
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
    """Whether the rows that it reads and writes are what it takes its time for."""
    inputs, outputs = linear.in_features, linear.out_features
    return inputs * outputs <= min(rows, MOST_INTENSE) * (inputs + outputs)


def _is_idle_depth(node: torch.fx.Node) -> bool:
    """Whether it is torchvision's stochastic depth, which does nothing where it does not train."""
    home, name = (getattr(node.target, of, None) or "" for of in ("__module__", "__name__"))
    known = name == "stochastic_depth" and home.startswith("torchvision.")
    return known and node.args[3:] == (False,) and not node.kwargs


def _sole_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
