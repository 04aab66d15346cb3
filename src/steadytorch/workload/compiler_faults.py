"""Refuses, or compiles otherwise, code that PyTorch's compiler would change the results of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn.functional import binary_cross_entropy

from steadytorch.errors import UnsupportedError

_CHECKING = (binary_cross_entropy, torch._assert_async)
"""Functions that check values in eager mode."""
_DRAWING = (torch.bernoulli, "bernoulli", "bernoulli_")
"""Functions that check probabilities in eager mode."""
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar)


def refuse_changed(graph: fx.GraphModule) -> None:
    """Refuses a graph from Dynamo that would return other numbers, or raise no exception.

    Call it from the backend, while Dynamo compiles the graph.

    Raises:
        UnsupportedError: the code draws numbers from a `random.Random`, of which Dynamo makes
            uninitialised ones; or it has an operator whose checks Inductor leaves out.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if InstructionTranslator.current_tx().output.random_calls:
        raise UnsupportedError("it draws numbers from a random.Random")
    for node in graph.graph.nodes:
        if node.target in _CHECKING or _takes_probabilities(node):
            raise UnsupportedError(f"compiled code would not check the values of {node.name}")


def _takes_probabilities(node: fx.Node) -> bool:
    if node.target not in _DRAWING:
        return False
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
    return isinstance(probability, fx.Node) or (probability is None and node.target != "bernoulli_")


@contextmanager
def refusing_caches() -> Iterator[None]:
    """Has Dynamo raise an exception for functions with `functools.lru_cache`.

    Dynamo traces the function itself: its body would run, and draw, again where eager mode keeps
    the first result. Dynamo's warning of it, which it gives once, becomes an error.
    """
    from torch._dynamo import utils

    utils.warn_once_cache.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo detected a call to a `functools.lru_cache`")
        yield


class KeepZeroProducts(CustomGraphPass):
    """Keeps products of floating-point tensors and an integer 0, which Inductor replaces by 0.

    NaN and infinities times 0 are NaN. Inductor keeps products with 0.0.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        for target in _PRODUCTS:
            for node in graph.find_nodes(op="call_function", target=target):
                value: Any = node.meta.get("val")
                if isinstance(value, torch.Tensor) and not _is_whole(value.dtype):
                    node.args = tuple(0.0 if _is_zero(each) else each for each in node.args)

    def uuid(self) -> bytes:
        """Part of the key of Inductor's cache."""
        return get_hash_for_files((__file__,), "zero")


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0
