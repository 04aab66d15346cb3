"""Graphs of kernels that run on the host, with the driver's interface to their parameters."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from steadytorch.graphs.copy_nodes import DescribedCopy
from steadytorch.graphs.pointers import DescribedKernel, DescribedMemset

KERNEL, COPY, SET, HOST, GRAPH = range(5)


class Node:
    """An operation of a replay.

    Args:
        work: takes the parameters, unpacked.
        formats: of each parameter, as `struct` has them.
        values: of each parameter, a sequence of numbers.
        kind: of node. Copies are given source, target and how many values of four bytes; what sets
            memory, target and how many.
    """

    def __init__(
        self,
        work: Callable[..., None],
        formats: Sequence[str],
        values: Sequence[Sequence[int]],
        kind: int = KERNEL,
    ) -> None:
        self.work, self.formats, self.kind = work, formats, kind
        packed = [struct.pack(f, *v) for f, v in zip(formats, values, strict=True)]
        self.recorded, self.now = packed, list(packed)
        self._kept = [ctypes.create_string_buffer(p, len(p)) for p in packed]
        self._places = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, self._kept))

    def describe(self, into: DescribedKernel, number: int) -> None:
        into.function = number
        into.values = ctypes.cast(self._places, ctypes.POINTER(ctypes.c_void_p))

    def describe_copy(self, into: DescribedCopy) -> None:
        (into.source,), (into.target,), (count,) = self._given()
        into.width_bytes, into.height, into.depth = 4 * count, 1, 1

    def describe_set(self, into: DescribedMemset) -> None:
        (into.target,), (count,) = self._given()
        into.element_bytes, into.width, into.height = 4, count, 1

    def _given(self) -> list[tuple[int, ...]]:
        return [struct.unpack(f, v) for f, v in zip(self.formats, self.recorded, strict=True)]

    def run(self) -> None:
        self.work(*[struct.unpack(f, v) for f, v in zip(self.formats, self.now, strict=True)])


class Graph:
    """A recorded graph; its own handle is 1, its first executable's 2, and nodes count from 1."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes, self.instantiated = nodes, 0

    def instantiate(self) -> None:
        self.instantiated += 1
        for node in self.nodes:
            node.now = list(node.recorded)

    def raw_cuda_graph(self) -> int:
        return 1

    def raw_cuda_graph_exec(self) -> int:
        return max(2, 1 + self.instantiated)

    def replay(self) -> None:
        for node in self.nodes:
            node.run()


class Driver:
    """The driver for one graph. `refuses` holds the names of functions that fail."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.refuses, self.puts = graph, set(), 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.graph.nodes)
        for i in range(0 if nodes is None else len(self.graph.nodes)):
            nodes[i] = i + 1
        return int("cuGraphGetNodes" in self.refuses)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self.graph.nodes[node.value - 1].kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, found: Any) -> int:  # noqa: N802
        self.graph.nodes[node.value - 1].describe(found._obj, node.value)
        return int("cuGraphKernelNodeGetParams_v2" in self.refuses)

    def cuGraphMemcpyNodeGetParams(self, node: Any, found: Any) -> int:  # noqa: N802
        self.graph.nodes[node.value - 1].describe_copy(found._obj)
        return int("cuGraphMemcpyNodeGetParams" in self.refuses)

    def cuGraphMemsetNodeGetParams(self, node: Any, found: Any) -> int:  # noqa: N802
        self.graph.nodes[node.value - 1].describe_set(found._obj)
        return int("cuGraphMemsetNodeGetParams" in self.refuses)

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        packed = self.graph.nodes[function.value - 1].recorded
        if index.value >= len(packed):
            return 1
        size._obj.value = len(packed[index.value])
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable: Any, node: Any, given: Any) -> int:  # noqa: N802
        assert executable.value == self.graph.raw_cuda_graph_exec()
        self.puts += 1
        if "put" in self.refuses:
            return 1
        target = self.graph.nodes[node.value - 1]
        target.now = [
            ctypes.string_at(given._obj.values[i], len(value))
            for i, value in enumerate(target.recorded)
        ]
        return 0


def float_at(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


def add_one(source: tuple[int], target: tuple[int], count: tuple[int]) -> None:
    """A kernel of two pointers and a number: writes each value and one."""
    read, written = float_at(source[0], count[0]), float_at(target[0], count[0])
    written[:] = [value + 1 for value in read]


def zero(target: tuple[int], count: tuple[int]) -> None:
    """A kernel of a pointer and a number: sets values to zero."""
    float_at(target[0], count[0])[:] = [0.0] * count[0]


def zeroing(y: Any, kind: int = KERNEL) -> Node:
    """The node for `y = 0`."""
    return Node(zero, "Qi", [(y.data_ptr(),), (y.numel(),)], kind)


def adding(x: Any, y: Any, kind: int = KERNEL) -> Node:
    """The node for `y = x + 1`."""
    return Node(add_one, "QQi", [(x.data_ptr(),), (y.data_ptr(),), (x.numel(),)], kind)


def packed_add(source: tuple[int, int, int], count: tuple[int]) -> None:
    """A kernel whose pointers lie within a structure; the middle one is where it writes."""
    add_one((source[0],), (source[1],), count)
