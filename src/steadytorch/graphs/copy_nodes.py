"""Copies at the start of a recorded graph, pointed at each call to where the caller's tensors lie.

A copy launched before the replay is the dearest part of a call that replays: the device waits while
the host launches it. As a node of the graph it costs the device its own time alone, and the host a
change of its source where that differs from the call before. Seen on an H200, before a replay of
0.9 ms: 8 us for a launched copy, 1 us for a node, 4 us for one whose source changes.

The nodes are made and changed through the CUDA driver's own interface, for PyTorch has none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadytorch.device.driver import cuda_driver
from steadytorch.graphs.input_nodes import InputNode

MOST = 3
"""Tensors that get nodes: for more, one launch that copies them all is cheaper than changing the
source of each."""

_DEVICE_MEMORY = 2
"""`CU_MEMORYTYPE_DEVICE`."""


class DescribedCopy(ctypes.Structure):
    """The driver's description of a copy, `CUDA_MEMCPY3D`."""

    _fields_ = (
        *[(f"source_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "level")],
        ("source_kind", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        *[(f"source_{name}", ctypes.c_void_p) for name in ("array", "reserved")],
        *[(f"source_{name}", ctypes.c_size_t) for name in ("pitch", "height")],
        *[(f"target_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "level")],
        ("target_kind", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        *[(f"target_{name}", ctypes.c_void_p) for name in ("array", "reserved")],
        *[(f"target_{name}", ctypes.c_size_t) for name in ("pitch", "height")],
        *[(name, ctypes.c_size_t) for name in ("width_bytes", "height", "depth")],
    )


class CopyNode(InputNode):
    """Copies into one static tensor whenever the graph is replayed.

    What the device cannot copy byte for byte, between types or layouts say, is copied by PyTorch
    before the replay, and the node is turned off.

    Args:
        driver: of CUDA.
        target: the static tensor: dense, and not complex.
        context: of the driver's, in which it was made.
    """

    __slots__ = ("_args", "_cell", "_copy", "_driver", "_set_source", "handle")

    def __init__(self, driver: Any, target: Tensor, context: ctypes.c_void_p) -> None:
        super().__init__(target)
        self._driver = driver
        self._copy = DescribedCopy(width_bytes=target.nbytes, height=1, depth=1)
        self._copy.source_kind = self._copy.target_kind = _DEVICE_MEMORY
        self._copy.source = self._copy.target = self._own
        self._cell = ctypes.c_uint64.from_buffer(self._copy, DescribedCopy.source.offset)
        self.handle = ctypes.c_void_p()
        self._args: tuple[Any, ...] = (ctypes.byref(self._copy), context)
        self._is_on = True

    def add_to(self, graph: ctypes.c_void_p) -> bool:
        """Adds the node to a graph of the driver's; False where the driver refuses."""
        new, add = ctypes.byref(self.handle), self._driver.cuGraphAddMemcpyNode
        return not add(new, graph, None, ctypes.c_size_t(0), *self._args)

    def open(self, executable: int) -> bool:
        """Takes the instantiated graph, and does nothing in it until fed; False where refused."""
        self._args = (ctypes.c_void_p(executable), self.handle, *self._args)
        self._set_source: Callable[[], int] = partial(
            self._driver.cuGraphExecMemcpyNodeSetParams, *self._args
        )
        self.source, self._is_open = self._own, True
        return self._turn(False)

    def _point(self, address: int) -> bool:
        self._cell.value = address
        return not self._set_source() and self._turn(True)

    def _rest(self) -> bool:
        return self._turn(False)

    def _turn(self, on: bool) -> bool:
        if self._is_on is not on and self._is_open:
            if self._driver.cuGraphNodeSetEnabled(*self._args[:2], ctypes.c_uint(on)):
                return False
            self._is_on = on
        return True


def add_copy_nodes(graph: torch.cuda.CUDAGraph, targets: list[Tensor]) -> list[CopyNode]:
    """Has a recorded graph begin with copies into its static inputs, and instantiates it.

    Args:
        graph: recorded with `keep_graph`, not instantiated yet.
        targets: the tensors that are its inputs.

    Returns:
        A node for each of them, in order; empty where copies have to be launched: without the
        driver's library (AMD), for many tensors, and for those that are not plain memory.
    """
    driver = cuda_driver()
    nodes: list[CopyNode] = []
    if driver is not None and len(targets) <= MOST and all(map(_fits, targets)):
        nodes = _added(driver, ctypes.c_void_p(graph.raw_cuda_graph()), targets)
    graph.instantiate()
    # One that cannot be turned off copies its target onto itself, which does no harm.
    opened = [node.open(graph.raw_cuda_graph_exec()) for node in nodes]
    return nodes if all(opened) else []


def _added(driver: Any, graph: ctypes.c_void_p, targets: list[Tensor]) -> list[CopyNode]:
    """A node for each target, before all that the graph begins with; empty where refused."""
    context, count = ctypes.c_void_p(), ctypes.c_size_t()
    if driver.cuCtxGetCurrent(ctypes.byref(context)):
        return []
    if driver.cuGraphGetRootNodes(graph, None, ctypes.byref(count)):
        return []
    array = ctypes.c_void_p * count.value
    first = array()
    if driver.cuGraphGetRootNodes(graph, first, ctypes.byref(count)):
        return []
    nodes = [CopyNode(driver, target, context) for target in targets]
    for node in nodes:
        if not node.add_to(graph):
            return []
        before = array(*[node.handle.value] * count.value)
        if driver.cuGraphAddDependencies(graph, before, first, count):
            return []
    return nodes


def _fits(target: Tensor) -> bool:
    """Whether it is plain memory of a GPU; complex tensors may be conjugated when they are read."""
    return target.is_cuda and target.numel() > 0 and not target.is_complex()
