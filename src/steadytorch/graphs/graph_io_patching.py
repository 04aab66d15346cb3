"""Recorded graphs that read and write where the caller's tensors lie, without a copy.

A static input need not be copied to, nor an output copied out, if every kernel that uses it is
given another address (`pointers`). Which these are is found by looking for addresses within the
tensor among all parameters, and is believed only after replays have shown it: with the tensor
elsewhere results are the same bits. An input's own place is neither read nor written then. An
output's may be: before the output was made other tensors lay there, larger ones too, and the
kernels that use those keep it.

What a node that is no kernel uses, or a descriptor hides from that proof, is copied: inputs by
nodes of the graph (`copy_nodes`), outputs by a launch after the replay.
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
"""Outputs below this are copied out: the host would be busy with their place before the replay, and
is not with a copy after it. PyTorch keeps what is larger apart from small tensors, so that there
were no semaphores and tables of addresses in such memory before."""
_T = TypeVar("_T")


class PointerNode(InputNode):
    """Has the kernels of a graph read the caller's tensor where it lies.

    Args:
        pointer: of the target, shown to be sound by `is_read_through`.
        target: the static input.
        around: see `link`. What lies in the graph's own memory, an aliased output say, is copied:
            a replay may write over it before all of it is read.
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
    """Has the next replay write an output to new memory.

    Args:
        pointer: of the output, of its `writers_of`.
        static: the output as recorded.

    Returns:
        See `Placer`; it raises RuntimeError where the graph must not be replayed.
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
    """How callers' tensors reach an instantiated graph, and its results them.

    Attributes:
        inputs: a node for each static input, in order; empty where copies have to be launched.
        outputs: a pointer for each output, in order; None where results have to be copied out.
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
    """Instantiates a recorded graph, and finds out what need not be copied.

    Args:
        graph: a `torch.cuda.CUDAGraph` recorded with `keep_graph`.
        replay: runs it once; done a few times.
        inputs: the static inputs.
        outputs: what the recording returned.
        around: of memory that is the graph's own, or another's of its pool.
    """
    driver = cuda_driver()
    # Read first, since what is replaced loses its place in the order of nodes.
    nodes = [] if driver is None else nodes_of(driver, graph.raw_cuda_graph())
    if driver is not None:
        replace_memsets(driver, graph)
    graph.instantiate()

    def pointer(static: Tensor, some: Sequence[Kernel | Fixed] = nodes) -> Pointer:
        return Pointer(some, graph.raw_cuda_graph_exec(), static)

    def shown(proof: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return proof()
        except RuntimeError:  # no memory for it, or the driver does not take an address back
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
    # Made now, because the graph was instantiated anew where nodes were added.
    return Linked(
        linked if len(linked) == len(inputs) else [],
        [pointer(each, of) if of else None for each, of in zip(outputs, writers, strict=True)],
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether it is plain memory of a GPU without holes, whose elements can be read as bytes."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    ways = (torch.contiguous_format, formats.get(tensor.dim(), torch.contiguous_format))
    whole = any(tensor.is_contiguous(memory_format=way) for way in ways)
    return tensor.is_cuda and whole and tensor.numel() > 0 and not tensor.is_complex()


def _is_large(tensor: Tensor) -> bool:
    """Whether a copy costs more than to change where it is written.

    Integers are left out: kernels that take them for indices must not meet those of a proof.
    """
    return tensor.is_floating_point() and tensor.nbytes >= LEAST_BYTES


def _is_alone(tensor: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether it is all of its memory, and no other output shares that.

    Kernels may write to what is around a part in some calls, to what is around new memory in none.
    """
    storage = tensor.untyped_storage()
    shared = sum(other.untyped_storage().data_ptr() == storage.data_ptr() for other in outputs)
    return shared == 1 and storage.nbytes() == tensor.nbytes
