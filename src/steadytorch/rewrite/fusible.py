"""Finds adjacent layers in a traced graph that one fused operator can replace."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.kernels.bias_add_relu import bias_add_relu
from steadytorch.kernels.conv_relu_max_pool import is_stem
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.workload.hooks import is_hooked

_POOLINGS = (F.max_pool2d, torch.max_pool2d)
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_)
ADDS = (operator.add, operator.iadd, torch.add)
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_MAKES_NEW = (
    *(*_CONVOLUTIONS, nn.BatchNorm2d, F.conv2d, F.batch_norm),
    *(torch.add, operator.add, torch.cat),
)
"""Layers and functions that allocate their output, so that an in-place ReLU on it can be fused."""
_GIVES_TENSOR = (
    *(*_CONVOLUTIONS, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d),
    *(*_RELUS, *_POOLINGS, relu_max_pool2d, bias_add_relu),
)
"""Layers and functions that return one tensor. Sums of a tensor and a number are not fused."""


class Pooled(NamedTuple):
    """A ReLU and the max pooling that is its only consumer."""

    relu: torch.fx.Node
    pool: torch.fx.Node
    window: tuple[Any, ...]


class Stem(NamedTuple):
    """A convolution of few channels whose output feeds only a ReLU with max pooling.

    Attributes:
        conv: the convolution.
        between: the nodes between it and the ReLU: a batch norm or identities.
        pooled: ReLU and pooling.
    """

    conv: torch.fx.Node
    between: tuple[torch.fx.Node, ...]
    pooled: Pooled


class Residual(NamedTuple):
    """A sum of two tensors and the ReLU that is its only consumer.

    Attributes:
        add: the sum.
        relu: the ReLU.
        biased: the convolution that feeds only this sum and whose bias can move into it, or None.
    """

    add: torch.fx.Node
    relu: torch.fx.Node
    biased: torch.fx.Node | None


class Layers:
    """A traced model, with lookups from graph nodes to the layers or functions they call.

    Args:
        model: the module that the graph refers to.
        graph: the trace of its `forward`.

    Attributes:
        model: as given.
        graph: as given.
        modules: the layers of the model by name.
        nodes: the nodes of the graph, in order, at construction.
    """

    def __init__(self, model: nn.Module, graph: torch.fx.Graph) -> None:
        self.model, self.graph = model, graph
        self.modules, self.nodes = dict(model.named_modules()), tuple(graph.nodes)
        self._calls = Counter(n.target for n in self.nodes if n.op == "call_module")
        self._read = {n.target for n in self.nodes if n.op == "get_attr"}

    def called(self, node: torch.fx.Node) -> Any:
        """Return the layer, function or method name that a node calls; None for hooked layers."""
        found = self.modules[str(node.target)] if node.op == "call_module" else node.target
        return None if isinstance(found, nn.Module) and is_hooked(found) else found

    def pooled(self) -> Iterator[Pooled]:
        """Yield each ReLU that can be fused into the max pooling after it."""
        for pool in self.nodes:
            window = self._window(pool)
            relu = pool.all_input_nodes[0] if len(pool.all_input_nodes) == 1 else None
            if window is None or relu is None or len(relu.users) != 1 or not self._is_relu(relu):
                continue
            if not self._is_in_place(relu) or self._is_new(relu.all_input_nodes[0]):
                yield Pooled(relu, pool, window)

    def stems(self, folded: frozenset[str] = frozenset()) -> Iterator[Stem]:
        """Yield each convolution of few channels that feeds only a ReLU with max pooling.

        Args:
            folded: names of batch norms that can be folded into their convolution.
        """
        for pooled in self.pooled():
            between, node = [], pooled.relu.all_input_nodes[0]
            while len(node.users) == 1 and (self.is_idle(node) or str(node.target) in folded):
                between.append(node)
                node = node.all_input_nodes[0]
            if len(node.users) == 1 and self._is_stem(node, pooled.window):
                yield Stem(node, tuple(between), pooled)

    def residuals(self) -> Iterator[Residual]:
        """Yield each sum of two tensors before a ReLU, unless that ReLU fuses into a pooling."""
        left_out = {pooled.relu for pooled in self.pooled()}
        for relu in self.nodes:
            add = relu.all_input_nodes[0] if len(relu.all_input_nodes) == 1 else None
            if add is None or len(add.users) != 1 or relu in left_out or not self._is_relu(relu):
                continue
            if self._is_sum(add):
                yield Residual(add, relu, self._biased(add))

    def _window(self, node: torch.fx.Node) -> tuple[Any, ...] | None:
        """Return the arguments of a max pooling for `relu_max_pool2d`; None for other nodes."""
        called = self.called(node)
        if node.op == "call_module" and type(called) is nn.MaxPool2d:
            arguments = {name: getattr(called, name) for name in _NAMES if name != "input"}
        elif node.op == "call_function" and called in _POOLINGS:
            bound = _POOLING.bind(*node.args, **node.kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
        else:
            return None
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        return None if arguments["return_indices"] else tuple(arguments[name] for name in names)

    def _is_relu(self, node: torch.fx.Node) -> bool:
        called = self.called(node)
        if node.op == "call_module":
            return type(called) is nn.ReLU
        if node.op == "call_function":
            return called in _RELUS
        return node.op == "call_method" and called in ("relu", "relu_")

    def _is_in_place(self, node: torch.fx.Node) -> bool:
        called = self.called(node)
        if node.op == "call_module":
            return called.inplace
        if called is F.relu:
            return bool(node.kwargs.get("inplace", node.args[1] if len(node.args) > 1 else False))
        return called in ("relu_", torch.relu_, F.relu_)

    def is_idle(self, node: torch.fx.Node) -> bool:
        """Whether a node calls an `nn.Identity`."""
        return node.op == "call_module" and type(self.called(node)) is nn.Identity

    def _kind(self, node: torch.fx.Node) -> Any:
        """Return the type of the layer that a node calls, or the function or method name."""
        called = self.called(node)
        return type(called) if node.op == "call_module" else called

    def _is_new(self, node: torch.fx.Node) -> bool:
        """Whether no other node sees this node's output memory, so that a write can be skipped."""
        while len(node.users) == 1:
            if not self.is_idle(node):
                return self._kind(node) in _MAKES_NEW
            node = node.all_input_nodes[0]
        return False

    def _is_stem(self, node: torch.fx.Node, window: tuple[Any, ...]) -> bool:
        conv = self.called(node)
        if node.op != "call_module" or not _is_plain(conv) or len(node.args) != 1:
            return False
        kernel_size, stride, padding, dilation, _ = window
        sizes = [_pair(size) for size in (kernel_size, stride, padding, dilation)]
        if not all(isinstance(size, int) for pair in sizes for size in pair):
            return False
        shape = (1, conv.in_channels, 1, 1)
        return sizes[3] == (1, 1) and is_stem(shape, conv.weight.shape, *sizes[:3])

    def _is_sum(self, node: torch.fx.Node) -> bool:
        in_place = node.target in (operator.iadd, "add_")
        known = node.op == "call_function" and node.target in ADDS
        known = known or (node.op == "call_method" and node.target in ("add", "add_"))
        if not known or node.kwargs or len(node.args) != 2:
            return False
        first, second = node.args
        if not (self._is_tensor(first) and self._is_tensor(second)) or first is second:
            return False
        return not in_place or (isinstance(first, torch.fx.Node) and self._is_new(first))

    def _is_tensor(self, value: Any) -> bool:
        while isinstance(value, torch.fx.Node):
            if not self.is_idle(value):
                return self._kind(value) in _GIVES_TENSOR or self._is_sum(value)
            value = value.all_input_nodes[0]
        return False

    def _biased(self, add: torch.fx.Node) -> torch.fx.Node | None:
        for node in add.all_input_nodes:
            while len(node.users) == 1 and self.is_idle(node):
                node = node.all_input_nodes[0]
            conv = self.called(node)
            if len(node.users) != 1 or node.op != "call_module" or type(conv) is not nn.Conv2d:
                continue
            is_read = f"{node.target}.bias" in self._read
            if conv.bias is not None and not is_read and self._calls[node.target] == 1:
                return node
        return None


def _is_plain(conv: Any) -> bool:
    """Whether a layer is an undilated, ungrouped Conv2d with symmetric zero padding."""
    if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros":
        return False
    return not isinstance(conv.padding, str) and conv.dilation == (1, 1) and conv.groups == 1


def _pair(size: Any) -> tuple[Any, ...]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _pooling(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    """Mirror the arguments of PyTorch's max pooling, which has no signature to inspect."""


_POOLING = inspect.signature(_pooling)
_NAMES = tuple(_POOLING.parameters)
