"""The backend `steady` of `torch.compile`: each captured graph is served by its own plans."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import msgspec
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from steadytorch.errors import UsageError, one_line
from steadytorch.runtime.report import Report
from steadytorch.tune.optimize import optimize
from steadytorch.workload.signature import tensors_of

OPTIONS = (
    *("mode", "store", "objective", "precision", "tolerance", "budget", "max_memory"),
    *("background", "canary", "verify_every", "bundle", "seed", "agree"),
)
"""Keys of `options`: arguments of `steady.optimize`."""
FIRST = "the first call of a graph runs as captured"
GRADIENTS = "gradients are recorded: call under torch.no_grad()"
OTHER_WEIGHTS = "the graph was called with other weights than at its first compilation"
WRITES = "the graph writes to its inputs or weights"
SWITCHES = "the graph switches autocast or grad mode"
ALIASES = "an output of the graph shares memory with an input or another output"

_SWITCHING = (torch._C._set_grad_enabled, torch.amp._enter_autocast, torch.amp._exit_autocast)
log = logging.getLogger("steadytorch")


def steady(
    graph: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="steady")`; PyTorch finds it by entry point.

    Each graph that Dynamo captures gets its own plans, one per input signature, dynamic shapes
    included. Without a plan, the graph runs as captured, in eager mode.

    Args:
        graph: the captured graph.
        example_inputs: its inputs at the first call, parameters and buffers included.
        mode: `mode` of `steady.optimize`; None for the one in `options`, or `replay`.
        options: further arguments of `steady.optimize`; see `OPTIONS`.

    Returns:
        A callable with the graph's inputs and outputs.

    Raises:
        UsageError: an option is unknown or its value is wrong. Dynamo wraps the error.
    """
    given = dict(options or {}) | ({} if mode is None else {"mode": mode})
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise UsageError(
            f"unknown option {unknown[0]!r} of backend steady: choose from {', '.join(OPTIONS)}"
        )
    try:
        captured = CapturedGraph(graph, example_inputs, given)
    except UsageError:
        raise
    except Exception as error:
        log.warning("running a graph as captured: %s", one_line(error))
        return graph.forward
    GRAPHS.add(captured)
    return captured.run


def reports() -> list[Report]:
    """One `Report` for each graph that this process compiled and still holds."""
    return [graph.report() for graph in sorted(GRAPHS, key=lambda graph: graph.number)]


GRAPHS: WeakSet[CapturedGraph] = WeakSet()
"""Graphs that this process compiled and still holds."""


class CapturedGraph:
    """A captured graph with its parameters and buffers bound, run by its own plans.

    Dynamo passes weights as inputs. Plans need weights as module attributes, so the weight inputs
    of the graph become attributes again. A call with other weights, or with gradient recording,
    runs the graph as captured. A graph that writes to its inputs or whose outputs share memory
    always runs as captured, since code after a graph break could see a difference. The first call
    checks the graph for writes to inputs and shared memory.

    Args:
        graph: the captured graph.
        examples: its example inputs.
        options: arguments of `optimize`.

    Attributes:
        number: position among the graphs compiled in this process.
    """

    count = 0

    def __init__(self, graph: fx.GraphModule, examples: list[Any], options: dict[str, Any]) -> None:
        self._graph = graph
        weights = {place: each for place, each in enumerate(examples) if _is_weight(each)}
        self._weights = list(weights.items())
        self._given = [place for place in range(len(examples)) if place not in weights]
        self._fast = optimize(_with_weights(graph, weights), **options)
        self._calls: Counter[str] = Counter()
        # A worker retraces the graph on loading: these calls would run then, and not be recorded.
        switches = any(node.target in _SWITCHING for node in graph.graph.nodes)
        self._problem: str | None = SWITCHES if switches else FIRST
        CapturedGraph.count += 1
        self.number = CapturedGraph.count

    def run(self, *args: Any) -> Any:
        """Runs the graph on these inputs, with a plan where possible."""
        problem = self._problem_of(args)
        if problem is None:
            return self._fast(*[args[place] for place in self._given])
        self._calls[f"untouched: {problem}"] += 1
        return self._inspected(args) if problem == FIRST else self._graph.forward(*args)

    def report(self) -> Report:
        """Counts of calls by outcome, including calls that ran the graph as captured."""
        found = self._fast.report()
        return msgspec.structs.replace(found, calls=dict(Counter(found.calls) + self._calls))

    def _problem_of(self, args: tuple[Any, ...]) -> str | None:
        if torch.is_grad_enabled() and any(weight.requires_grad for _, weight in self._weights):
            return GRADIENTS
        if self._problem is not None:
            return self._problem
        same = all(args[place] is weight for place, weight in self._weights)
        return None if same else OTHER_WEIGHTS

    def _inspected(self, args: tuple[Any, ...]) -> Any:
        """Runs the graph as captured and decides whether plans may serve it."""
        given = tensors_of(args)
        before = [each._version for each in given if not each.is_inference()]
        outputs = self._graph.forward(*args)
        after = [each._version for each in given if not each.is_inference()]
        places = [_storage(each) for each in tensors_of(outputs)]
        is_shared = not set(places).isdisjoint(map(_storage, given))
        if before != after:
            self._problem = WRITES
        elif is_shared or len(set(places)) < len(places):
            self._problem = ALIASES
        else:
            self._problem = None
        return outputs


def _is_weight(example: Any) -> bool:
    """Whether an example input is a parameter or buffer of a module, and holds values."""
    if isinstance(example, FakeTensor):
        return False
    marked = getattr(example, "_dynamo_static_input_type", None) is not None
    return isinstance(example, nn.Parameter) or (isinstance(example, Tensor) and marked)


def _with_weights(graph: fx.GraphModule, weights: dict[int, Tensor]) -> nn.Module:
    """A copy of the graph in which the given weights are attributes instead of inputs."""
    made = copy.deepcopy(graph.graph)
    attributes: dict[str, Any] = {
        node.target: attrgetter(node.target)(graph)
        for node in made.nodes
        if node.op in ("get_attr", "call_module")
    }
    for place, node in enumerate(made.find_nodes(op="placeholder")):
        if (weight := weights.get(place)) is not None:
            name = f"weight_{place}"
            with made.inserting_before(node):
                node.replace_all_uses_with(made.get_attr(name))
            made.erase_node(node)
            attributes[name] = weight
    for node in made.nodes:
        node.meta = {}  # holds fake tensors, and paths of source files
    return fx.GraphModule(attributes, made).eval()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
