"""Addresses among the parameters of recorded kernels, changed through the CUDA driver's interface.

PyTorch has none for this. A recorded kernel keeps the addresses that it was recorded with, and the
driver can give it others before a replay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

ALIGNMENT = 256
"""Bytes. Kernels are chosen and compiled for how their recorded addresses are aligned; none loads
or stores more at once than a fraction of this."""
_KERNEL = 0
"""`CU_GRAPH_NODE_TYPE_KERNEL`."""
_WORD = 8
"""Bytes of an address."""


class _Parameters(ctypes.Structure):
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


class Kernel:
    """A kernel node and the values of its parameters, which the next `put` hands to the driver.

    Args:
        driver: of CUDA.
        handle: of the node.
        described: what the driver says of it.
        values: bytes of each parameter.
    """

    def __init__(
        self, driver: Any, handle: int, described: _Parameters, values: Sequence[bytes]
    ) -> None:
        self._driver, self._handle = driver, ctypes.c_void_p(handle)
        self._values = [ctypes.create_string_buffer(value, len(value)) for value in values]
        places = [ctypes.addressof(value) for value in self._values]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self._described = _Parameters.from_buffer_copy(described)
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

    def putter(self, executable: int) -> Callable[[], int]:
        """The function that hands the values to an instantiated graph; it returns 0 for success."""
        put = self._driver.cuGraphExecKernelNodeSetParams_v2
        given = (ctypes.c_void_p(executable), self._handle, ctypes.byref(self._described))
        return lambda: put(*given)


def kernels_of(driver: Any, graph: int) -> list[Kernel]:
    """The kernels of a graph whose parameters can be read; others are left out.

    Args:
        driver: of CUDA.
        graph: the driver's, not instantiated.
    """
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return []
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return []
    found = (_kernel(driver, node) for node in nodes if node is not None)
    return [kernel for kernel in found if kernel is not None]


def _kernel(driver: Any, node: int) -> Kernel | None:
    handle, kind, described = ctypes.c_void_p(node), ctypes.c_int(), _Parameters()
    if driver.cuGraphNodeGetType(handle, ctypes.byref(kind)) or kind.value != _KERNEL:
        return None
    if driver.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(described)):
        return None
    if not described.values:  # none, or packed in a way of the program's own
        return None
    sizes = _sizes(driver, described)
    values = [ctypes.string_at(described.values[i], size) for i, size in enumerate(sizes)]
    return Kernel(driver, node, described, values) if values else None


def _sizes(driver: Any, described: _Parameters) -> list[int]:
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
        kernels: of the graph.
        executable: the instantiated graph.
        static: the tensor: dense memory of its own.

    Attributes:
        address: where the next replay reads or writes; None after a failure.
    """

    def __init__(self, kernels: Sequence[Kernel], executable: int, static: Tensor) -> None:
        self.own = static.data_ptr()
        size = static.numel() * static.element_size()
        within = [(kernel, kernel.cells_within(self.own, size)) for kernel in kernels]
        # What is handed to the driver lies in memory that belongs to these.
        self._kernels = [kernel for kernel, cells in within if cells]
        self._cells = [cell for _, cells in within for cell in cells]
        self._puts = [kernel.putter(executable) for kernel in self._kernels]
        self.address: int | None = self.own

    @property
    def is_used(self) -> bool:
        """Whether any kernel holds such an address, and others may take its place."""
        return bool(self._cells) and not self.own % ALIGNMENT

    def point(self, address: int) -> bool:
        """Has replays use this address; False where it is not aligned, or the driver refuses."""
        if address % ALIGNMENT and address != self.own:
            return False
        self.address = None
        for cell, offset in self._cells:
            cell.value = address + offset
        if any(put() for put in self._puts):
            return False
        self.address = address
        return True
