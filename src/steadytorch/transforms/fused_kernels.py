"""Replaces neighbouring layers by one operator that passes over memory once."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from steadytorch.device.facts import DeviceFacts
from steadytorch.kernels.relu_max_pool import relu_max_pool2d
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.tracing import is_hooked, traced, untraceable
from steadytorch.transforms.traits import capability_below, decide, no_copy, no_cuda
from steadytorch.workload.workload import Workload

_NO_PAIR = "the model has no ReLU whose result goes to a max-pooling in two dimensions alone"
_POOLINGS = (F.max_pool2d, torch.max_pool2d)
_RELUS = ("relu", "relu_")
_MAKES_NEW = (
    *(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    *(F.conv2d, F.batch_norm, torch.add, operator.add, torch.cat),
)
"""Layers and functions whose result is memory of its own, which a ReLU may be left out of."""


class Pair(NamedTuple):
    """Nodes of a graph: a ReLU, and the pooling that alone reads its result."""

    relu: torch.fx.Node
    pool: torch.fx.Node
    window: tuple[Any, ...]


class FusedKernels(Transform):
    """Runs ReLU and max-pooling as one kernel.

    The model is replaced by its graph; modules, weights and their names stay as they are, on a copy
    that shares them. What `forward` does besides computing its result is not repeated.
    """

    name = "fused_kernels"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, Triton, and a ReLU before a max-pooling.

        The model's `forward` is traced with symbols to find one; no arithmetic is done.
        """
        module = workload.module
        refused = decide(
            *no_copy(workload),
            no_cuda(facts),
            (facts.triton is None, "needs Triton, which is not installed"),
            capability_below(facts, (8, 0), "the fused kernels"),
            (module is not None and is_hooked(module), "the model has hooks, which a graph lacks"),
        )
        if isinstance(refused, NotApplicable):
            return refused
        try:
            model, graph = traced(workload)
            return decide((not fusible_pairs(model, graph), _NO_PAIR))
        except Exception as error:  # forward is the user's code: anything may come out of tracing
            return untraceable(error)

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload on the graph with fused operators; there is nothing to undo."""
        model, graph = traced(workload)
        for pair in fusible_pairs(model, graph):
            _fuse(graph, pair)
        yield workload.with_model(torch.fx.GraphModule(model, graph))


def fusible_pairs(model: nn.Module, graph: torch.fx.Graph) -> list[Pair]:
    """Finds the pairs that can be fused without a change of results.

    Args:
        model: what the graph refers to.
        graph: of its `forward`.
    """
    modules = dict(model.named_modules())

    def layer(node: torch.fx.Node) -> Any:
        """What a node calls: a layer that has no hooks, a function, or the name of a method."""
        found = modules[str(node.target)] if node.op == "call_module" else node.target
        return None if isinstance(found, nn.Module) and is_hooked(found) else found

    pairs = []
    for pool in graph.nodes:
        window = _window(pool, layer(pool))
        relu = pool.all_input_nodes[0] if len(pool.all_input_nodes) == 1 else None
        if window is None or relu is None or len(relu.users) != 1:
            continue
        if _is_relu(relu, layer(relu)) and (
            not _is_in_place(relu, layer(relu)) or _is_new(relu.all_input_nodes[0], layer)
        ):
            pairs.append(Pair(relu, pool, window))
    return pairs


def _window(node: torch.fx.Node, called: Any) -> tuple[Any, ...] | None:
    """The window of a max-pooling as `relu_max_pool2d` takes it, or None of any other node."""
    if node.op == "call_module" and type(called) is nn.MaxPool2d:
        arguments = {name: getattr(called, name) for name in _POOLING.parameters if name != "input"}
    elif node.op == "call_function" and called in _POOLINGS:
        bound = _POOLING.bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
    else:
        return None
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    return None if arguments["return_indices"] else tuple(arguments[name] for name in names)


def _pooling(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    """The arguments of PyTorch's own, which has no signature to ask."""


_POOLING = inspect.signature(_pooling)


def _is_relu(node: torch.fx.Node, called: Any) -> bool:
    if node.op == "call_module":
        return type(called) is nn.ReLU
    if node.op == "call_function":
        return called in (F.relu, F.relu_, torch.relu, torch.relu_)
    return node.op == "call_method" and called in _RELUS


def _is_in_place(node: torch.fx.Node, called: Any) -> bool:
    if node.op == "call_module":
        return called.inplace
    if called is F.relu:
        return bool(node.kwargs.get("inplace", node.args[1] if len(node.args) > 1 else False))
    return called in ("relu_", torch.relu_, F.relu_)


def _is_new(node: torch.fx.Node, layer: Callable[[torch.fx.Node], Any]) -> bool:
    """Whether no one else sees this node's memory, so that a ReLU written into it is not missed."""
    while len(node.users) == 1:
        called = layer(node)
        if type(called) is not nn.Identity:
            return (type(called) if node.op == "call_module" else called) in _MAKES_NEW
        node = node.all_input_nodes[0]
    return False


def _fuse(graph: torch.fx.Graph, pair: Pair) -> None:
    relu, pool, window = pair
    with graph.inserting_before(pool):
        fused = graph.call_function(relu_max_pool2d, (relu.all_input_nodes[0], *window))
    pool.replace_all_uses_with(fused)
    graph.erase_node(pool)
    graph.erase_node(relu)
