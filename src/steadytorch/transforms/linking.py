"""Recorded graphs that read and write where the caller's tensors lie, without a copy.

A static input need not be copied to, nor an output copied out, if every kernel that uses it is
given another address (`pointers`). Which these are is found by looking for addresses within the
tensor among all parameters, and is believed only after replays have shown it: with the tensor
elsewhere results are the same bits. An input's own place is neither read nor written then. An
output's may be: before the output was made other tensors lay there, larger ones too, and the
kernels that use those keep it.

What a descriptor hides, or a node that is no kernel uses, fails that proof, and is copied: inputs
by nodes of the graph (`copy_nodes`), outputs by a launch after the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadytorch.transforms.copy_nodes import MOST, add_copy_nodes, cuda_driver
from steadytorch.transforms.input_nodes import InputNode
from steadytorch.transforms.pointers import Kernel, Pointer, kernels_of
from steadytorch.transforms.static_buffers import Placer

LEAST_BYTES = 1 << 20
"""Outputs below this are copied out: the host would be busy with their place before the replay, and
is not with a copy after it."""
_SENTINELS = (0xFF, 0x7B)
"""Bytes of NaN, and of a large number, in each floating-point type: what is added to shows."""
_GUARD_BYTES = 1 << 16
"""Before and after an output that is tried elsewhere; a multiple of how addresses are aligned."""
_MOST_WRITERS = 16
"""Kernels that are tried as those that use an output: each more costs two replays."""


class PointerNode(InputNode):
    """Has the kernels of a graph read the caller's tensor where it lies.

    Args:
        pointer: of the target, shown to be sound by `is_read_through`.
        target: the static input.
    """

    __slots__ = ("_pointer",)

    def __init__(self, pointer: Pointer, target: Tensor) -> None:
        super().__init__(target)
        self._pointer, self.source, self._is_open = pointer, pointer.address, True

    def _point(self, address: int) -> bool:
        self._is_on = self._pointer.point(address)
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


def rest(pointer: Pointer) -> None:
    """Has the next replay use the memory that was recorded.

    Raises:
        RuntimeError: the driver refuses; the graph must not be replayed.
    """
    if pointer.address != pointer.own and not pointer.point(pointer.own):
        raise RuntimeError("the CUDA driver refuses to give a graph its own output back")


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
    room: Callable[[Tensor], int],
) -> Linked:
    """Instantiates a recorded graph, and finds out what need not be copied.

    Args:
        graph: a `torch.cuda.CUDAGraph` recorded with `keep_graph`.
        replay: runs it once; done a few times.
        inputs: the static inputs.
        outputs: what the recording returned.
        room: bytes from where a tensor starts to the end of memory that is the graph's own, where
            nobody else looks; 0 for a tensor elsewhere.
    """
    driver = cuda_driver()
    graph.instantiate()
    kernels = [] if driver is None else kernels_of(driver, graph.raw_cuda_graph())

    def pointer(static: Tensor, writers: Sequence[Kernel] = kernels) -> Pointer:
        return Pointer(writers, graph.raw_cuda_graph_exec(), static)

    known = bool(kernels) and all(map(is_dense, [*inputs, *outputs]))
    read = [
        known and len(inputs) <= MOST and is_read_through(pointer(each), each, replay, outputs)
        for each in inputs
    ]
    writers = [
        writers_of(each, kernels, pointer, replay, outputs, room(each))
        if known and _is_large(each) and _is_alone(each, outputs)
        else ()
        for each in outputs
    ]
    copied = [each for each, through in zip(inputs, read, strict=True) if not through]
    copies = iter(add_copy_nodes(graph, copied) if copied else [])
    nodes: list[InputNode | None] = [
        PointerNode(pointer(each), each) if through else next(copies, None)
        for each, through in zip(inputs, read, strict=True)
    ]
    linked = [node for node in nodes if node is not None]
    # Made now, because the graph was instantiated anew where nodes were added.
    return Linked(
        linked if len(linked) == len(inputs) else [],
        [pointer(e, found) if found else None for e, found in zip(outputs, writers, strict=True)],
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether it is plain memory of a GPU without holes, whose elements can be read as bytes."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    ways = (torch.contiguous_format, formats.get(tensor.dim(), torch.contiguous_format))
    whole = any(tensor.is_contiguous(memory_format=way) for way in ways)
    return tensor.is_cuda and whole and tensor.numel() > 0 and not tensor.is_complex()


def _is_large(tensor: Tensor) -> bool:
    """Whether a copy costs more than to change where it is written."""
    return tensor.numel() * tensor.element_size() >= LEAST_BYTES


def _is_alone(tensor: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether no other output shares its memory."""
    address = tensor.untyped_storage().data_ptr()
    return sum(other.untyped_storage().data_ptr() == address for other in outputs) == 1


def is_read_through(
    pointer: Pointer, static: Tensor, replay: Callable[[], None], outputs: Sequence[Tensor]
) -> bool:
    """Whether replays take an input from where it points and leave that unchanged.

    Args:
        pointer: of the input.
        static: the input; it has its own values again when this returns.
        replay: runs the graph once.
        outputs: of the graph, dense.

    Returns:
        False also where nothing can be told: all values are alike, or two replays differ.
    """
    given, elsewhere, moved = static.clone(), static.clone(), _others(static)
    if not pointer.is_used or same_bits(moved, given):
        return False
    expected = _after(replay, outputs)
    try:
        static.copy_(moved)
        if not pointer.point(elsewhere.data_ptr()):
            return False
        found = _after(replay, outputs)
        return (
            all(map(same_bits, found, expected))
            and same_bits(elsewhere, given)
            and same_bits(static, moved)
        )
    finally:
        static.copy_(given)
        pointer.point(pointer.own)


def writers_of(
    static: Tensor,
    kernels: Sequence[Kernel],
    pointer: Callable[[Tensor, Sequence[Kernel]], Pointer],
    replay: Callable[[], None],
    outputs: Sequence[Tensor],
    room: int,
) -> Sequence[Kernel]:
    """The kernels that have to be pointed elsewhere for an output to be put there.

    Those that use the output come after all that use what lay in its memory before. So they are the
    last few, and the fewest with which replays give the same bits and touch nothing else there.

    Args:
        static: the output, dense; it has the results of a replay when this returns.
        kernels: of the graph, in the order in which they were recorded.
        pointer: makes one of a tensor for some of them.
        replay: runs the graph once.
        outputs: all of the graph's, `static` among them.
        room: bytes, see `link`.

    Returns:
        None at all where the output has to be copied out.
    """
    start, size = static.data_ptr(), static.numel() * static.element_size()
    users = [kernel for kernel in kernels if kernel.cells_within(start, size)]
    if not room:
        return ()
    # Those that use what lay there before may write up to the end of what is the graph's own.
    length = 2 * _GUARD_BYTES + max(room, size)
    try:
        memory = torch.empty(length, dtype=torch.uint8, device=static.device)
    except torch.OutOfMemoryError:
        return ()
    for count in range(1, min(len(users), _MOST_WRITERS) + 1):
        found = pointer(static, users[-count:])
        if found.is_used and all(
            _is_whole(found, static, replay, outputs, memory, sentinel) for sentinel in _SENTINELS
        ):
            return users[-count:]
    return ()


def _is_whole(
    pointer: Pointer,
    static: Tensor,
    replay: Callable[[], None],
    outputs: Sequence[Tensor],
    memory: Tensor,
    sentinel: int,
) -> bool:
    """Whether a replay whose pointer leads into other memory gives the same bits, and no more."""
    expected, size = _after(replay, outputs), static.numel() * static.element_size()
    inner = memory[_GUARD_BYTES : _GUARD_BYTES + size].view(static.dtype)
    elsewhere = inner.as_strided(static.shape, static.stride())
    results = [elsewhere if output is static else output for output in outputs]
    try:
        as_bytes(static).fill_(sentinel)
        memory.fill_(sentinel)
        if not pointer.point(elsewhere.data_ptr()):
            return False
        found = _after(replay, results)
        around = (memory[:_GUARD_BYTES], memory[_GUARD_BYTES + size :])
        return all(map(same_bits, found, expected)) and all(
            bool((zone == sentinel).all()) for zone in around
        )
    finally:
        pointer.point(pointer.own)
        replay()


def _others(tensor: Tensor) -> Tensor:
    """Other values: integers, which may be indices, are the same ones in other places."""
    if tensor.is_floating_point():
        return 1 - tensor
    other = tensor.clone()
    in_memory(other).copy_(in_memory(tensor).roll(1))
    return other


def _after(replay: Callable[[], None], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the outputs of a replay."""
    replay()
    return [output.clone() for output in outputs]


def in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order in which they lie, as a view."""
    return in_memory(tensor).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of the same strides hold the same bits."""
    return torch.equal(as_bytes(one), as_bytes(other))
