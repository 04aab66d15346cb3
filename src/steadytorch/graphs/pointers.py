"""Finds and patches addresses in the parameters of recorded kernels.

A recorded kernel keeps the addresses that it was recorded with; the CUDA driver can replace them
before a replay. PyTorch has no interface for patching addresses, so the CUDA driver is called
directly. Copy and memset nodes are not patched; only their address ranges are read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from steadytorch.graphs.copy_nodes import DescribedCopy

ALIGNMENT = 256
"""Bytes. Kernels are specialised to the alignment of their recorded addresses; no load or store is
wider than a fraction of this."""
KERNEL, COPY, MEMSET = 0, 1, 2
"""Values of `CUgraphNodeType`."""
_TOUCH_NOTHING = (3, 5, 6, 7, 10, 11)
"""`CUgraphNodeType` of nodes to skip: host functions, empty, event, and allocation nodes."""
_WORD = 8
"""Size of an address in bytes."""


class DescribedKernel(ctypes.Structure):
    """The driver's `CUDA_KERNEL_NODE_PARAMS_v2`."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *[(f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", ctypes.c_uint),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class DescribedMemset(ctypes.Structure):
    """The driver's `CUDA_MEMSET_NODE_PARAMS`."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Fixed(NamedTuple):
    """A copy or memset node, whose addresses stay fixed.

    Attributes:
        spans: start and end addresses of all memory that it may read or write.
    """

    spans: tuple[tuple[int, int], ...]

    def uses(self, start: int, size: int) -> bool:
        """Whether the node may read or write within an address range."""
        return any(first < start + size and start < end for first, end in self.spans)


class Kernel:
    """A kernel node and its parameter values; `putter` makes a function to set them in a graph.

    Args:
        driver: the CUDA driver library.
        handle: the node's handle.
        described: the driver's description of the node.
        values: the bytes of each parameter.
    """

    def __init__(
        self, driver: Any, handle: int, described: DescribedKernel, values: Sequence[bytes]
    ) -> None:
        self._driver, self._handle = driver, ctypes.c_void_p(handle)
        self._values = [ctypes.create_string_buffer(value, len(value)) for value in values]
        places = [ctypes.addressof(value) for value in self._values]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self._described = DescribedKernel.from_buffer_copy(described)
        self._described.values = ctypes.cast(self._places, ctypes.POINTER(ctypes.c_void_p))

    def cells_within(self, start: int, size: int) -> list[tuple[ctypes.c_uint64, int]]:
        """Return the 8-byte parameter cells that hold an address in a range, with its offset."""
        found = []
        for value in self._values:
            for at in range(0, len(value) - _WORD + 1, _WORD):
                cell = ctypes.c_uint64.from_buffer(value, at)
                if start <= cell.value < start + size:
                    found.append((cell, cell.value - start))
        return found

    def uses(self, start: int, size: int) -> bool:
        """Whether the kernel's parameters hold an address in a range."""
        return bool(self.cells_within(start, size))

    def putter(self, executable: int) -> Callable[[], int]:
        """Make a function that sets the kernel's parameters in an instantiated graph.

        The function returns 0 on success, otherwise the driver's error code.
        """
        put = self._driver.cuGraphExecKernelNodeSetParams_v2
        given = (ctypes.c_void_p(executable), self._handle, ctypes.byref(self._described))
        return partial(put, *given)


def nodes_of(driver: Any, graph: int) -> list[Kernel | Fixed]:
    """Read the nodes of a graph, in recording order.

    Kernels with unreadable parameters and nodes that touch no memory are left out.

    Args:
        driver: the CUDA driver library.
        graph: handle of the graph, not instantiated.

    Returns:
        The nodes. Empty for a graph with other node types, such as child graphs, and before CUDA
        12.4.
    """
    if not hasattr(driver, "cuFuncGetParamInfo"):
        return []
    known = {KERNEL: _kernel, COPY: _copied, MEMSET: _set}
    found: list[Kernel | Fixed] = []
    for node in node_handles(driver, graph):
        kind = node_kind(driver, node)
        if kind in _TOUCH_NOTHING:
            continue
        described = known[kind](driver, node) if kind in known else None
        if described is not None:
            found.append(described)
        elif kind != KERNEL:
            return []
    return found


def node_handles(driver: Any, graph: int) -> list[int]:
    """Return the node handles of a graph, in recording order; empty if the driver refuses."""
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return []
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return []
    return [node or 0 for node in nodes]


def node_kind(driver: Any, node: int) -> int | None:
    """Return the `CUgraphNodeType` of a node; None if the driver refuses."""
    kind = ctypes.c_int()
    refused = driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
    return None if refused else kind.value


def _copied(driver: Any, node: int) -> Fixed | None:
    of = DescribedCopy()
    if driver.cuGraphMemcpyNodeGetParams(ctypes.c_void_p(node), ctypes.byref(of)):
        return None
    spans: list[tuple[int, int]] = []
    for side in ("source", "target"):
        x, y, z, pitch, height = (
            getattr(of, f"{side}_{name}") for name in ("x", "y", "z", "pitch", "height")
        )
        rows = (z + max(of.depth, 1) - 1) * max(height, of.height) + y + max(of.height, 1) - 1
        # The memory type decides which of the two applies; take both.
        starts = (getattr(of, side), getattr(of, f"{side}_host") or 0)
        spans += [(start, start + rows * pitch + x + of.width_bytes) for start in starts if start]
    return Fixed(tuple(spans))


def _set(driver: Any, node: int) -> Fixed | None:
    of = DescribedMemset()
    if driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(of)):
        return None
    size = (max(of.height, 1) - 1) * of.pitch + of.width * of.element_bytes
    return Fixed(((of.target, of.target + size),))


def _kernel(driver: Any, node: int) -> Kernel | None:
    handle, described = ctypes.c_void_p(node), DescribedKernel()
    if driver.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(described)):
        return None
    if not described.values:  # no parameters, or packed into `extra`
        return None
    sizes = _sizes(driver, described)
    values = [ctypes.string_at(described.values[i], size) for i, size in enumerate(sizes)]
    return Kernel(driver, node, described, values) if values else None


def _sizes(driver: Any, described: DescribedKernel) -> list[int]:
    """Return the size of each kernel parameter in bytes."""
    if described.function:
        ask, of = driver.cuFuncGetParamInfo, ctypes.c_void_p(described.function)
    else:
        ask, of = driver.cuKernelGetParamInfo, ctypes.c_void_p(described.kernel)
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not ask(of, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


class Pointer:
    """All kernel parameters of an instantiated graph that hold an address of one static tensor.

    Args:
        nodes: the nodes to patch; a copy or memset node on the tensor rules out relocation.
        executable: handle of the instantiated graph.
        static: the tensor, dense and with its own memory.

    Attributes:
        address: where the next replay reads or writes; None after a failure.
    """

    def __init__(self, nodes: Sequence[Kernel | Fixed], executable: int, static: Tensor) -> None:
        self.own = static.data_ptr()
        size = static.nbytes
        kernels = [node for node in nodes if isinstance(node, Kernel)]
        within = [(kernel, kernel.cells_within(self.own, size)) for kernel in kernels]
        self._stays = any(isinstance(e, Fixed) and e.uses(self.own, size) for e in nodes)
        # These own the memory that is passed to the driver: keep them alive.
        self._kernels = [kernel for kernel, cells in within if cells]
        self._cells = [cell for _, cells in within for cell in cells]
        self._puts = [kernel.putter(executable) for kernel in self._kernels]
        self.address: int | None = self.own

    @property
    def is_used(self) -> bool:
        """Whether kernels hold an address of the tensor and every such address can be patched."""
        return bool(self._cells) and not self._stays and not self.own % ALIGNMENT

    def point(self, address: int) -> bool:
        """Make replays use `address`; return False if it is unaligned or the driver refuses."""
        if address % ALIGNMENT and address != self.own:
            return False
        self.address = None
        for cell, offset in self._cells:
            cell.value = address + offset
        for put in self._puts:  # no `any`: the device idles here, and a generator costs time
            if put():
                return False
        self.address = address
        return True


def rest(pointer: Pointer) -> None:
    """Make the next replay use the pointer's recorded address again.

    Raises:
        RuntimeError: the driver refuses; the graph must not be replayed.
    """
    if pointer.address != pointer.own and not pointer.point(pointer.own):
        raise RuntimeError("the CUDA driver refused to restore an address of a recorded graph")
