"""Kernels in the place of a recorded graph's nodes that set memory.

Libraries set workspace to zero before a kernel that sums into it: cuDNN before attention, cuBLAS
before products that are cut along their inner axis. As a node of a graph that costs far more than
the setting: 5 us from kernel to kernel on an H200, where the memory itself is set in 1 us. A kernel
that writes the same takes its place; it is PyTorch's own `fill_`, recorded for that memory.
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
"""What is set, by bytes of an element."""
_DEVICE_OF_MEMORY = 9
"""`CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`."""


class _Memset(NamedTuple):
    handle: int
    memory: Tensor
    value: int


def replace_memsets(driver: Any, graph: torch.cuda.CUDAGraph) -> int:
    """Puts kernels in the place of nodes that set plain memory of the current device.

    Args:
        driver: of CUDA.
        graph: recorded with `keep_graph`, not instantiated yet. Nothing else is being recorded on
            this thread, nor on the current stream, which is not the default one.

    Returns:
        How many were replaced. A node stays where the driver refuses, and where its neighbours do
        not wait for all of it.
    """
    found = _memsets(driver, graph.raw_cuda_graph())
    if not found:
        return 0
    try:
        fills = _recorded_fills(found)
    except RuntimeError:  # CUDA refuses, or there is no memory for it
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


def _recorded_fills(memsets: Sequence[_Memset]) -> torch.cuda.CUDAGraph:
    """A graph of one kernel for each, in order."""
    fills = torch.cuda.CUDAGraph(keep_graph=True)
    # Without a stream it would be one for the whole process, on which others may be recording, and
    # of whichever device was the first.
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(fills, stream=stream, capture_error_mode="thread_local"):
        for memset in memsets:
            memset.memory.fill_(memset.value)
    return fills


def _memsets(driver: Any, graph: int) -> list[_Memset]:
    found = []
    for node in node_handles(driver, graph):
        of = DescribedMemset()
        if node_kind(driver, node) != MEMSET:
            continue
        if driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(of)):
            continue
        dtype = _TYPES.get(of.element_bytes)
        if dtype is not None and of.height <= 1 and of.width and _is_here(driver, of.target):
            memory = _memory(of.target, of.width, dtype)
            found.append(_Memset(node, memory, _signed(of.value, dtype)))
    return found


def _is_here(driver: Any, address: int) -> bool:
    """Whether it is memory of the current device: kernels fail on that of others."""
    device, which = ctypes.c_int(), ctypes.c_int(_DEVICE_OF_MEMORY)
    refused = driver.cuPointerGetAttribute(ctypes.byref(device), which, ctypes.c_uint64(address))
    return not refused and device.value == torch.cuda.current_device()


def _is_chain(driver: Any, nodes: Sequence[int]) -> bool:
    """Whether each node waits for the one before it alone, as in the order of recording."""
    for waited, node in zip([[], *([node] for node in nodes)], nodes, strict=False):
        before = _neighbours(driver.cuGraphNodeGetDependencies, ctypes.c_void_p(node))
        if before is None or list(before) != waited:
            return False
    return True


def _signed(value: int, dtype: torch.dtype) -> int:
    """The bits of a value as an element of this type has them."""
    raw = (value & (1 << 8 * dtype.itemsize) - 1).to_bytes(dtype.itemsize, "little")
    return int.from_bytes(raw, "little", signed=dtype.is_signed)


def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor at an address, which it does not own."""
    device = torch.device("cuda", torch.cuda.current_device())
    lent: Any = torch._C._construct_storage_from_data_pointer(  # pyright: ignore[reportAttributeAccessIssue]
        address, device, count * dtype.itemsize
    )
    return torch.empty(0, dtype=dtype, device=device).set_(lent, 0, (count,), (1,))


def _replaced(driver: Any, graph: ctypes.c_void_p, memset: int, kernel: int) -> bool:
    """Adds the kernel between what the memset stands between, and takes that out."""
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
    """Nodes before or after one; None where the driver would leave out how they depend on it."""
    count = ctypes.c_size_t()
    if ask(node, None, ctypes.byref(count)):
        return None
    found = (ctypes.c_void_p * count.value)()
    return found if not count.value or not ask(node, found, ctypes.byref(count)) else None
