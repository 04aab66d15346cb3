"""Replaces memset nodes of a recorded CUDA graph by fill kernels, which are faster.

Libraries zero a workspace before a kernel that accumulates into it: cuDNN for attention, cuBLAS for
split-k products. As a graph node, a memset adds 5 us between two kernels on an H200, although
setting the memory takes 1 us. PyTorch's `fill_` kernel, recorded for the same memory, replaces the
memset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadytorch.graphs.pointers import (
    KERNEL,
    MEMSET,
    DescribedKernel,
    DescribedMemset,
    node_handles,
    node_kind,
)

_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The dtype to fill with, by element size in bytes."""
_DEVICE_OF_MEMORY = 9
"""`CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`."""


class Memset(NamedTuple):
    """A memset node to replace.

    Attributes:
        handle: the node.
        memory: a tensor over the memory that it sets.
        value: the value of each element.
    """

    handle: int
    memory: Tensor
    value: int


def replace_memsets(driver: Any, graph: torch.cuda.CUDAGraph) -> int:
    """Replace memset nodes on plain memory of the current device by fill kernels.

    Args:
        driver: the CUDA driver library.
        graph: recorded with `keep_graph`, not instantiated yet. The current stream must not be the
            default one, and neither it nor this thread may be capturing.

    Returns:
        The number of replaced nodes. A node stays if the driver refuses, or if its neighbours do
        not wait for all of it.
    """
    found = _memsets(driver, graph.raw_cuda_graph())
    if not found:
        return 0
    try:
        fills = record_fills(found)
    except RuntimeError:  # CUDA refuses, or out of memory
        return 0
    try:
        kernels = node_handles(driver, fills.raw_cuda_graph())
        if len(kernels) != len(found) or not _is_chain(driver, kernels):
            return 0
        into = ctypes.c_void_p(graph.raw_cuda_graph())
        pairs = zip(found, kernels, strict=True)
        return sum(_replaced(driver, into, memset.handle, kernel) for memset, kernel in pairs)
    finally:
        fills.reset()


def record_fills(memsets: Sequence[Memset]) -> torch.cuda.CUDAGraph:
    """Record a graph with one fill kernel per memset, in order."""
    fills = torch.cuda.CUDAGraph(keep_graph=True)
    # The default is one stream for the whole process, on the first device used, and others may be
    # capturing on it.
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(fills, stream=stream, capture_error_mode="thread_local"):
        for memset in memsets:
            memset.memory.fill_(memset.value)
    return fills


def _memsets(driver: Any, graph: int) -> list[Memset]:
    found = []
    for node in node_handles(driver, graph):
        of = DescribedMemset()
        if node_kind(driver, node) != MEMSET:
            continue
        if driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(of)):
            continue
        dtype = _TYPES.get(of.element_bytes)
        if dtype is not None and of.height <= 1 and of.width and _is_here(driver, of.target):
            memory = memory_at(of.target, of.width, dtype)
            found.append(Memset(node, memory, signed(of.value, dtype)))
    return found


def _is_here(driver: Any, address: int) -> bool:
    """Whether an address is on the current device; kernels fail on other devices' memory."""
    device, which = ctypes.c_int(), ctypes.c_int(_DEVICE_OF_MEMORY)
    refused = driver.cuPointerGetAttribute(ctypes.byref(device), which, ctypes.c_uint64(address))
    return not refused and device.value == torch.cuda.current_device()


def _is_chain(driver: Any, nodes: Sequence[int]) -> bool:
    """Whether each node depends on exactly the one before it, as in recording order."""
    for waited, node in zip([[], *([node] for node in nodes)], nodes, strict=False):
        before = _neighbours(driver.cuGraphNodeGetDependencies, ctypes.c_void_p(node))
        if before is None or list(before) != waited:
            return False
    return True


def signed(value: int, dtype: torch.dtype) -> int:
    """Convert a memset value to the integer of `dtype` that has the same bits."""
    raw = (value & (1 << 8 * dtype.itemsize) - 1).to_bytes(dtype.itemsize, "little")
    return int.from_bytes(raw, "little", signed=dtype.is_signed)


def memory_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor that views the memory at `address` without owning it."""
    device = torch.device("cuda", torch.cuda.current_device())
    lent: Any = torch._C._construct_storage_from_data_pointer(  # pyright: ignore[reportAttributeAccessIssue]
        address, device, count * dtype.itemsize
    )
    return torch.empty(0, dtype=dtype, device=device).set_(lent, 0, (count,), (1,))


def _replaced(driver: Any, graph: ctypes.c_void_p, memset: int, kernel: int) -> bool:
    """Put a fill kernel between the memset's neighbours and remove the memset."""
    described, old, new = DescribedKernel(), ctypes.c_void_p(memset), ctypes.c_void_p()
    if node_kind(driver, kernel) != KERNEL:
        return False
    if driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(kernel), ctypes.byref(described)):
        return False
    before = _neighbours(driver.cuGraphNodeGetDependencies, old)
    after = _neighbours(driver.cuGraphNodeGetDependentNodes, old)
    if before is None or after is None:
        return False
    count, given = ctypes.c_size_t(len(before)), ctypes.byref(described)
    if driver.cuGraphAddKernelNode_v2(ctypes.byref(new), graph, before, count, given):
        return False
    starts = (ctypes.c_void_p * len(after))(*[new.value] * len(after))
    count = ctypes.c_size_t(len(after))
    refused = driver.cuGraphAddDependencies(graph, starts, after, count) if len(after) else 0
    if refused or driver.cuGraphDestroyNode(old):
        driver.cuGraphDestroyNode(new)
        return False
    return True


def _neighbours(ask: Any, node: ctypes.c_void_p) -> Any:
    """Return a node's predecessors or successors; None if their edges carry data to preserve."""
    count = ctypes.c_size_t()
    if ask(node, None, ctypes.byref(count)):
        return None
    found = (ctypes.c_void_p * count.value)()
    return found if not count.value or not ask(node, found, ctypes.byref(count)) else None
