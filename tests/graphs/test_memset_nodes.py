"""Nodes that set memory, replaced through a driver of our own; a real one: tests/gpu."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from steadytorch.graphs import memset_nodes
from steadytorch.graphs.memset_nodes import replace_memsets, signed
from steadytorch.graphs.pointers import DescribedKernel, DescribedMemset

MEMSET, KERNEL = 2, 0
HANDLE = 7
FILLS = 8


class Driver:
    """The driver for graph 7, with edges between numbered nodes, and graph 8 with its fills."""

    def __init__(self, kinds: dict[int, int], edges: set[tuple[int, int]], *refuses: str) -> None:
        self.kinds, self.edges, self.refuses = dict(kinds), set(edges), refuses
        self.fills = [100 + n for n, kind in kinds.items() if kind == MEMSET]
        self.chain, self.device = set(pairwise(self.fills)), 0
        self.height, self.element_bytes = 1, 4
        self.added: dict[int, int] = {}

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("cu") and name in self.refuses:
            return lambda *given: 1
        return found

    def _list(self, found: list[int], into: Any, count: Any) -> int:
        count._obj.value = len(found)
        if into is not None:
            into[: len(found)] = found
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        return self._list(self.fills if graph.value == FILLS else [*self.kinds], nodes, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self.kinds.get(node.value, KERNEL)
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, found: Any) -> int:  # noqa: N802
        of: DescribedMemset = found._obj
        of.target, of.value, of.width = 1000 * node.value, 5, 16
        of.element_bytes, of.height = self.element_bytes, self.height
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: Any, address: Any) -> int:  # noqa: N802
        assert attribute.value == 9
        assert address.value in {1000 * n for n, kind in self.kinds.items() if kind == MEMSET}
        found._obj.value = self.device
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, found: Any) -> int:  # noqa: N802
        found._obj.function = node.value
        return 0

    def cuGraphNodeGetDependencies(self, node: Any, into: Any, count: Any) -> int:  # noqa: N802
        edges = self.edges | self.chain
        return self._list(sorted(a for a, b in edges if b == node.value), into, count)

    def cuGraphNodeGetDependentNodes(self, node: Any, into: Any, count: Any) -> int:  # noqa: N802
        return self._list(sorted(b for a, b in self.edges if a == node.value), into, count)

    def cuGraphAddKernelNode_v2(self, new, graph, before, count, of):  # noqa: N802
        assert graph.value == HANDLE
        described: DescribedKernel = of._obj
        new._obj.value = 200 + described.function
        self.kinds[new._obj.value] = KERNEL
        self.added[new._obj.value] = described.function
        self.edges |= {(before[i], new._obj.value) for i in range(count.value)}
        return 0

    def cuGraphAddDependencies(self, graph: Any, starts: Any, ends: Any, count: Any) -> int:  # noqa: N802
        self.edges |= {(starts[i], ends[i]) for i in range(count.value)}
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:  # noqa: N802
        if "destroy memset" in self.refuses and self.kinds[node.value] == MEMSET:
            return 1
        del self.kinds[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0


class Graph:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def raw_cuda_graph(self) -> int:
        return self.handle

    def reset(self) -> None:
        pass


NODES = {1: KERNEL, 2: MEMSET, 3: KERNEL, 4: MEMSET, 5: KERNEL}
EDGES = {(1, 2), (2, 3), (1, 3), (3, 4), (4, 5), (3, 5)}


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """The fills to record, as address, count, dtype and value."""
    found = []

    def memory(address, count, dtype):
        return (address, count, dtype)

    def record(memsets):
        found.extend((*each.memory, each.value) for each in memsets)
        return Graph(FILLS)

    monkeypatch.setattr(memset_nodes, "memory_at", memory)
    monkeypatch.setattr(memset_nodes, "record_fills", record)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def test_a_kernel_stands_between_what_the_memset_stood_between(recorded):
    driver = Driver(NODES, EDGES)
    assert replace_memsets(driver, Graph(HANDLE)) == 2
    assert MEMSET not in driver.kinds.values()
    first, second = 302, 304
    assert driver.added == {first: 102, second: 104}
    own = {(1, first), (first, 3), (3, second), (second, 5), (1, 3), (3, 5)}
    assert driver.edges == own
    assert recorded == [(2000, 16, torch.int32, 5), (4000, 16, torch.int32, 5)]


def test_a_memset_with_nothing_before_or_after_it_is_replaced():
    driver = Driver({2: MEMSET}, set())
    assert replace_memsets(driver, Graph(HANDLE)) == 1
    assert (list(driver.kinds), driver.edges) == ([302], set())


@pytest.mark.parametrize(
    "refused",
    [
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphMemsetNodeGetParams",
        "cuPointerGetAttribute",
        "cuGraphKernelNodeGetParams_v2",
        "cuGraphNodeGetDependencies",
        "cuGraphNodeGetDependentNodes",
        "cuGraphAddKernelNode_v2",
        "cuGraphAddDependencies",
        "destroy memset",
    ],
)
def test_a_refusal_leaves_the_graph_as_it_is(refused):
    driver = Driver(NODES, EDGES, refused)
    assert replace_memsets(driver, Graph(HANDLE)) == 0
    assert (driver.kinds, driver.edges) == (NODES, EDGES)


@pytest.mark.parametrize(("name", "value"), [("height", 2), ("element_bytes", 8), ("device", 1)])
def test_what_no_fill_can_set_stays(name, value):
    driver = Driver(NODES, EDGES)
    setattr(driver, name, value)
    assert replace_memsets(driver, Graph(HANDLE)) == 0
    assert driver.kinds == NODES


def test_other_kernels_than_one_for_each_are_not_trusted():
    driver = Driver(NODES, EDGES)
    driver.fills.append(106)
    assert replace_memsets(driver, Graph(HANDLE)) == 0
    assert driver.kinds == NODES


def test_kernels_in_another_order_than_recorded_are_not_trusted():
    driver = Driver(NODES, EDGES)
    driver.fills.reverse()
    assert replace_memsets(driver, Graph(HANDLE)) == 0
    assert (driver.kinds, driver.edges) == (NODES, EDGES)


def test_nodes_stay_where_nothing_can_be_recorded(monkeypatch):
    def refuse(memsets):
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(memset_nodes, "record_fills", refuse)
    driver = Driver(NODES, EDGES)
    assert replace_memsets(driver, Graph(HANDLE)) == 0
    assert (driver.kinds, driver.edges) == (NODES, EDGES)


def test_it_is_recorded_on_the_stream_that_the_caller_has_for_itself(monkeypatch):
    monkeypatch.undo()  # of what stands in for the recording
    stream, seen = object(), []

    @contextmanager
    def recording(graph, **how):
        seen.append(how)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: Graph(FILLS))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    memory = torch.zeros(3, dtype=torch.int32)
    fills = memset_nodes.record_fills([memset_nodes.Memset(2, memory, 5)])
    assert fills.raw_cuda_graph() == FILLS
    assert seen == [{"stream": stream, "capture_error_mode": "thread_local"}]
    assert memory.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (0xFF, torch.uint8, 255),
        (0xFFFE, torch.int16, -2),
        (0x7FFF, torch.int16, 0x7FFF),
        (0xFFFFFFFF, torch.int32, -1),
        (0, torch.int32, 0),
    ],
)
def test_values_are_the_bits_that_the_driver_sets(value, dtype, expected):
    assert signed(value, dtype) == expected
