"""Patches recorded graphs to read and write the caller's tensors without a copy.

Copies to static inputs and from outputs are unnecessary if all kernels get the caller's addresses
instead (see `pointers`). The kernels that use a tensor are found by searching all kernel parameters
for addresses within the tensor. Relocating a tensor is trusted only after test replays with the
tensor elsewhere give bit-identical results (see `pointer_validation`).

Replays neither read nor write the original memory of a relocated input. The original memory of a
relocated output may stay in use by earlier kernels, for other tensors, even larger ones.

A tensor that is used by a non-kernel node, or through a descriptor, fails validation and is copied.
Inputs are copied by graph nodes (see `copy_nodes`), outputs by a launch after the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from steadytorch.device.driver import cuda_driver
from steadytorch.graphs.copy_nodes import MOST, add_copy_nodes
from steadytorch.graphs.input_nodes import InputNode
from steadytorch.graphs.memset_nodes import replace_memsets
from steadytorch.graphs.pointer_validation import Around, is_read_through, writers_of
from steadytorch.graphs.pointers import Fixed, Kernel, Pointer, nodes_of, rest
from steadytorch.graphs.static_buffers import Placer

LEAST_BYTES = (1 << 20) + 1
"""Smaller outputs are copied out: relocating them delays the replay, while a copy runs after it.
PyTorch allocates larger tensors apart from small ones, so their memory never held semaphores or
address tables."""
_T = TypeVar("_T")


class PointerNode(InputNode):
    """Makes the kernels of a graph read the caller's tensor directly, without a copy.

    Args:
        pointer: the pointer of the target, validated by `is_read_through`.
        target: the static input.
        around: see `link`. A tensor in the graph's own memory, such as an aliased output, is
            copied: a replay may overwrite it before reading all of it.
    """

    __slots__ = ("_around", "_pointer")

    def __init__(self, pointer: Pointer, target: Tensor, around: Around) -> None:
        super().__init__(target)
        self._pointer, self.source, self._is_open = pointer, pointer.address, True
        self._around = around

    def _point(self, address: int) -> bool:
        self._is_on = self._around(address) is None and self._pointer.point(address)
        return self._is_on

    def _rest(self) -> bool:
        own, self._is_on = self._pointer.own, False
        return not self._is_open or self._pointer.address == own or self._pointer.point(own)


def placer(pointer: Pointer, static: Tensor) -> Placer:
    """Make a function that redirects an output to new memory for the next replay.

    Args:
        pointer: the pointer over the output's `writers_of`.
        static: the output as recorded.

    Returns:
        See `Placer`. It raises RuntimeError if the graph must not be replayed.
    """
    shape, strides, dtype = static.shape, static.stride(), static.dtype
    device, point = static.device, pointer.point

    def place() -> Tensor | None:
        new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if point(new.data_ptr()):
            return new
        rest(pointer)
        return None

    return place


class Linked(NamedTuple):
    """How an instantiated graph gets its inputs and returns its outputs.

    Attributes:
        inputs: one node per static input, in order; empty if copies must be launched.
        outputs: one pointer per output, in order; None for outputs that must be copied out.
    """

    inputs: list[InputNode]
    outputs: list[Pointer | None]


def link(
    graph: Any,
    replay: Callable[[], None],
    inputs: list[Tensor],
    outputs: list[Tensor],
    around: Around,
) -> Linked:
    """Instantiate a recorded graph, and find the inputs and outputs that need no copy.

    Args:
        graph: a `torch.cuda.CUDAGraph` recorded with `keep_graph`.
        replay: replays the graph; called several times.
        inputs: the static inputs.
        outputs: the tensors that the recording returned.
        around: finds memory of the graph's pool.
    """
    driver = cuda_driver()
    # Read before `replace_memsets`, which changes the order of nodes.
    nodes = [] if driver is None else nodes_of(driver, graph.raw_cuda_graph())
    if driver is not None:
        replace_memsets(driver, graph)
    graph.instantiate()

    def pointer(static: Tensor, some: Sequence[Kernel | Fixed] = nodes) -> Pointer:
        return Pointer(some, graph.raw_cuda_graph_exec(), static)

    def shown(proof: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return proof()
        except RuntimeError:  # out of memory, or the driver refused to restore an address
            graph.instantiate()
            return otherwise

    known = bool(nodes) and all(map(is_dense, [*inputs, *outputs]))
    read = [
        known
        and len(inputs) <= MOST
        and shown(partial(is_read_through, pointer(each), each, replay, outputs), False)
        for each in inputs
    ]
    writers = [
        shown(partial(writers_of, each, nodes, pointer, replay, outputs, around), ())
        if known and _is_large(each) and _is_alone(each, outputs)
        else ()
        for each in outputs
    ]
    copied = [each for each, through in zip(inputs, read, strict=True) if not through]
    copies = iter(add_copy_nodes(graph, copied) if copied else [])
    found: list[InputNode | None] = [
        PointerNode(pointer(each), each, around) if through else next(copies, None)
        for each, through in zip(inputs, read, strict=True)
    ]
    linked = [node for node in found if node is not None]
    # Created last, because adding nodes instantiates the graph again.
    return Linked(
        linked if len(linked) == len(inputs) else [],
        [pointer(each, of) if of else None for each, of in zip(outputs, writers, strict=True)],
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is plain GPU memory without gaps, readable as bytes."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    ways = (torch.contiguous_format, formats.get(tensor.dim(), torch.contiguous_format))
    whole = any(tensor.is_contiguous(memory_format=way) for way in ways)
    return tensor.is_cuda and whole and tensor.numel() > 0 and not tensor.is_complex()


def _is_large(tensor: Tensor) -> bool:
    """Whether copying an output costs more than redirecting it.

    Integer outputs are excluded, because kernels might use the validation's sentinel values as
    indices.
    """
    return tensor.is_floating_point() and tensor.nbytes >= LEAST_BYTES


def _is_alone(tensor: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether a tensor fills its storage and no other output shares that storage.

    If a tensor is only part of a storage, kernels may legitimately write around it in some calls.
    """
    storage = tensor.untyped_storage()
    shared = sum(other.untyped_storage().data_ptr() == storage.data_ptr() for other in outputs)
    return shared == 1 and storage.nbytes() == tensor.nbytes
