"""Addresses among the parameters of recorded kernels, changed through the CUDA driver's interface.

PyTorch has none for this. A recorded kernel keeps the addresses that it was recorded with, and the
driver can give it others before a replay. Nodes that copy or set memory are known by where they do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from steadytorch.graphs.copy_nodes import DescribedCopy

ALIGNMENT = 256
"""Bytes. Kernels are chosen and compiled for how their recorded addresses are aligned; none loads
or stores more at once than a fraction of this."""
KERNEL, COPY, MEMSET = 0, 1, 2
"""Values of `CUgraphNodeType`."""
_TOUCH_NOTHING = (3, 5, 6, 7, 10, 11)
"""The same for functions of the host, empty nodes, events, and memory that is taken and given."""
_WORD = 8
"""Bytes of an address."""


class DescribedKernel(ctypes.Structure):
    """The driver's description of a kernel node, `CUDA_KERNEL_NODE_PARAMS_v2`."""

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
    """The driver's description of memory that is set, `CUDA_MEMSET_NODE_PARAMS`."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Fixed(NamedTuple):
    """A node that copies or sets memory, always the same.

    Attributes:
        spans: start and end of all that it may read or write.
    """

    spans: tuple[tuple[int, int], ...]

    def uses(self, start: int, size: int) -> bool:
        """Whether it may read or write any of this memory."""
        return any(first < start + size and start < end for first, end in self.spans)


class Kernel:
    """A kernel node and the values of its parameters, which the next `put` hands to the driver.

    Args:
        driver: of CUDA.
        handle: of the node.
        described: what the driver says of it.
        values: bytes of each parameter.
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
        """Where its parameters hold addresses of this memory, each with the offset into it."""
        found = []
        for value in self._values:
            for at in range(0, len(value) - _WORD + 1, _WORD):
                cell = ctypes.c_uint64.from_buffer(value, at)
                if start <= cell.value < start + size:
                    found.append((cell, cell.value - start))
        return found

    def uses(self, start: int, size: int) -> bool:
        """Whether its parameters hold an address of this memory."""
        return bool(self.cells_within(start, size))

    def putter(self, executable: int) -> Callable[[], int]:
        """The function that hands the values to an instantiated graph; it returns 0 for success."""
        put = self._driver.cuGraphExecKernelNodeSetParams_v2
        given = (ctypes.c_void_p(executable), self._handle, ctypes.byref(self._described))
        return partial(put, *given)


def nodes_of(driver: Any, graph: int) -> list[Kernel | Fixed]:
    """What is known of a graph, in the order in which it was recorded.

    Kernels whose parameters cannot be read are left out, as are nodes that touch no memory.

    Args:
        driver: of CUDA.
        graph: the driver's, not instantiated.

    Returns:
        Nothing for a graph with nodes of other kinds, graphs within it say, or before CUDA 12.4.
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
    """The nodes of a graph, in the order in which they were recorded; empty where refused."""
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return []
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return []
    return [node or 0 for node in nodes]


def node_kind(driver: Any, node: int) -> int | None:
    """The driver's `CUgraphNodeType` of a node; None where refused."""
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
        # Which of the two counts depends on the kind of memory.
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
    if not described.values:  # none, or packed in a way of the program's own
        return None
    sizes = _sizes(driver, described)
    values = [ctypes.string_at(described.values[i], size) for i, size in enumerate(sizes)]
    return Kernel(driver, node, described, values) if values else None


def _sizes(driver: Any, described: DescribedKernel) -> list[int]:
    """Bytes of each parameter."""
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
    """Every parameter of an instantiated graph that holds an address of one static tensor.

    Args:
        nodes: of the graph; those that are no kernels keep the tensor from being used elsewhere.
        executable: the instantiated graph.
        static: the tensor: dense memory of its own.

    Attributes:
        address: where the next replay reads or writes; None after a failure.
    """

    def __init__(self, nodes: Sequence[Kernel | Fixed], executable: int, static: Tensor) -> None:
        self.own = static.data_ptr()
        size = static.nbytes
        kernels = [node for node in nodes if isinstance(node, Kernel)]
        within = [(kernel, kernel.cells_within(self.own, size)) for kernel in kernels]
        self._stays = any(isinstance(e, Fixed) and e.uses(self.own, size) for e in nodes)
        # What is handed to the driver lies in memory that belongs to these.
        self._kernels = [kernel for kernel, cells in within if cells]
        self._cells = [cell for _, cells in within for cell in cells]
        self._puts = [kernel.putter(executable) for kernel in self._kernels]
        self.address: int | None = self.own

    @property
    def is_used(self) -> bool:
        """Whether kernels hold such an address, and others may take its place wherever it is."""
        return bool(self._cells) and not self._stays and not self.own % ALIGNMENT

    def point(self, address: int) -> bool:
        """Has replays use this address; False where it is not aligned, or the driver refuses."""
        if address % ALIGNMENT and address != self.own:
            return False
        self.address = None
        for cell, offset in self._cells:
            cell.value = address + offset
        for put in self._puts:  # the device idles meanwhile: `any` would make a generator
            if put():
                return False
        self.address = address
        return True


def rest(pointer: Pointer) -> None:
    """Has the next replay use the memory that was recorded.

    Raises:
        RuntimeError: the driver refuses; the graph must not be replayed.
    """
    if pointer.address != pointer.own and not pointer.point(pointer.own):
        raise RuntimeError("the CUDA driver refuses to give a graph its own output back")
