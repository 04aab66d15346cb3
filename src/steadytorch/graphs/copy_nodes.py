"""Copy nodes at the start of a CUDA graph that copy the caller's tensors to its inputs.

A copy launched before the replay is the most expensive part of a replayed call: the device idles
while the host launches it. As a graph node, a copy only adds its own device time, and the host
updates the source address when it changes. Added time per call, measured on an H200 with a replay
of 0.9 ms:

- launched copy: 8 us
- copy node, same source: 1 us
- copy node, new source: 4 us.

PyTorch has no interface for copy nodes, so they are created and updated through the CUDA driver.
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
"""Maximum number of copy nodes. Above it, one launch that copies all inputs is cheaper than setting
each source."""

_DEVICE_MEMORY = 2
"""`CU_MEMORYTYPE_DEVICE`."""


class DescribedCopy(ctypes.Structure):
    """The driver's `CUDA_MEMCPY3D`."""

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
    """Graph node that copies the caller's tensor into one static tensor at each replay.

    A source that cannot be copied byte for byte (other dtype or layout) is copied by PyTorch before
    the replay, with the node turned off.

    Args:
        driver: the CUDA driver library.
        target: the static tensor: dense, and not complex.
        context: the driver context that the tensor belongs to.
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
        """Add the node to a driver graph; return False if the driver refuses."""
        new, add = ctypes.byref(self.handle), self._driver.cuGraphAddMemcpyNode
        return not add(new, graph, None, ctypes.c_size_t(0), *self._args)

    def open(self, executable: int) -> bool:
        """Attach the node, disabled, to the instantiated graph; return False if that is refused."""
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
    """Add copy nodes for the static inputs at a recorded graph's start; instantiate the graph.

    Args:
        graph: recorded with `keep_graph`, not instantiated yet.
        targets: the static inputs.

    Returns:
        One node per target, in order. Empty if copies must be launched: without the CUDA driver
        (AMD), for more than `MOST` tensors, or for tensors that are not plain memory.
    """
    driver = cuda_driver()
    nodes: list[CopyNode] = []
    if driver is not None and len(targets) <= MOST and all(map(_fits, targets)):
        nodes = _added(driver, ctypes.c_void_p(graph.raw_cuda_graph()), targets)
    graph.instantiate()
    # A node that cannot be turned off copies its target onto itself, which is harmless.
    opened = [node.open(graph.raw_cuda_graph_exec()) for node in nodes]
    return nodes if all(opened) else []


def _added(driver: Any, graph: ctypes.c_void_p, targets: list[Tensor]) -> list[CopyNode]:
    """Add a copy node per target, ahead of the graph's root nodes; return [] if refused."""
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
    """Whether a tensor is plain GPU memory; complex tensors may carry a pending conjugation."""
    return target.is_cuda and target.numel() > 0 and not target.is_complex()
