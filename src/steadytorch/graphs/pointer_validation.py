"""Validates, by replay, that kernels of a recorded graph can use other memory.

Replays must be harmless even if validation fails. Integer inputs may be indices, so their values
are permuted instead of replaced. Stray writes land in memory allocated for the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from steadytorch.graphs.pointers import Fixed, Kernel, Pointer, rest

Around = Callable[[int], range | None]
"""Returns the segment of the graph pool's memory that contains an address; None if outside."""

_SENTINELS = (0, 0xFF, 0x7B)
"""Fill bytes that read as zero, NaN and a large number in each floating-point dtype, so that
accumulation into them shows. Zero comes first: it is harmless as an index, and a kernel that
misreads it fails before the other values are tried."""
_GUARD_BYTES = 1 << 16
"""Guard zone around test memory; a multiple of `pointers.ALIGNMENT`."""
_MOST_WRITERS = 16
"""Maximum number of kernels tested as users of an output; each costs a few replays."""


def is_read_through(
    pointer: Pointer, static: Tensor, replay: Callable[[], None], outputs: Sequence[Tensor]
) -> bool:
    """Whether replays read an input from the pointer's address and leave it unchanged.

    Args:
        pointer: the pointer of the input.
        static: the input; its values are restored on return.
        replay: replays the graph once.
        outputs: the outputs of the graph, dense.

    Returns:
        Also False if the test is inconclusive: all values are equal, or two replays differ.

    Raises:
        RuntimeError: out of memory, or the driver refused to restore the address. The graph must be
            instantiated again.
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
        rest(pointer)


def writers_of(
    static: Tensor,
    nodes: Sequence[Kernel | Fixed],
    pointer: Callable[[Tensor, Sequence[Kernel | Fixed]], Pointer],
    replay: Callable[[], None],
    outputs: Sequence[Tensor],
    around: Around,
) -> Sequence[Kernel | Fixed]:
    """Find the kernels to patch so that an output is written elsewhere.

    Earlier kernels may use an output's memory for other tensors; the kernels that use the output
    come last. Of all kernels that use the memory, the result is the longest suffix with which
    replays are bit-identical and touch no other memory. The shortest suffix could omit a kernel
    that initialises the output, if the test inputs overwrite all of it. A suffix with one kernel
    too many usually reads data that was not relocated, so the replay differs.

    Args:
        static: the output, dense; on return it holds the results of a replay.
        nodes: the nodes of the graph, in recording order.
        pointer: makes a `Pointer` to a tensor over some nodes.
        replay: replays the graph once.
        outputs: all outputs of the graph, including `static`.
        around: finds memory of the graph's pool.

    Returns:
        The kernels; empty if the output must be copied out.

    Raises:
        RuntimeError: see `is_read_through`.
    """
    start, found = static.data_ptr(), ()
    users = [node for node in nodes if node.uses(start, static.nbytes)]
    segment = around(start)
    if segment is None:
        return ()
    trial = _Trial(static, replay, outputs, segment)
    for count in range(1, len(users) + 1):
        tried = users[-count:]
        if count > _MOST_WRITERS or isinstance(tried[0], Fixed):
            return ()  # the first user of the output cannot be determined
        if not trial.is_whole(pointer(static, tried)):
            if found:
                break
        elif trial.is_written_by(pointer(static, tried[:1])):
            found = tried
    return found


class _Trial:
    """Replays the graph with one output relocated to test memory.

    Args:
        static: the output.
        replay: replays the graph once.
        outputs: all outputs of the graph.
        segment: the pool segment that contains the output. Kernels that used it for other tensors
            are tested too and stay within it, so the test memory is as large.
    """

    def __init__(
        self,
        static: Tensor,
        replay: Callable[[], None],
        outputs: Sequence[Tensor],
        segment: range,
    ) -> None:
        at, size = _GUARD_BYTES + static.data_ptr() - segment.start, static.nbytes
        length = 2 * _GUARD_BYTES + len(segment)
        self._memory = torch.empty(length, dtype=torch.uint8, device=static.device)
        self._outside = (self._memory[:at], self._memory[at + size :])
        inner = self._memory[at : at + size].view(static.dtype)
        self._static, self._replay, self._outputs = static, replay, outputs
        self._elsewhere = inner.as_strided(static.shape, static.stride())

    def is_whole(self, pointer: Pointer) -> bool:
        """Whether relocating the output keeps results bit-identical and guard zones untouched."""
        if not pointer.is_used:
            return False
        expected = _after(self._replay, self._outputs)
        return all(self._is_whole(pointer, expected, sentinel) for sentinel in _SENTINELS)

    def _is_whole(self, pointer: Pointer, expected: list[Tensor], sentinel: int) -> bool:
        results = [self._elsewhere if each is self._static else each for each in self._outputs]
        with self._pointed(pointer, sentinel) as is_there:
            return (
                is_there
                and all(map(same_bits, _after(self._replay, results), expected))
                and all(bool((zone == sentinel).all()) for zone in self._outside)
            )

    def is_written_by(self, alone: Pointer) -> bool:
        """Whether a kernel writes to the test memory when only that kernel is redirected."""
        sentinel = _SENTINELS[-1]
        with self._pointed(alone, sentinel) as is_there:
            self._replay()
            return is_there and not bool((self._memory == sentinel).all())

    @contextmanager
    def _pointed(self, pointer: Pointer, sentinel: int) -> Iterator[bool]:
        try:
            as_bytes(self._static).fill_(sentinel)
            self._memory.fill_(sentinel)
            yield pointer.point(self._elsewhere.data_ptr())
        finally:
            rest(pointer)
            self._replay()


def _others(tensor: Tensor) -> Tensor:
    """Return a tensor with different values; integers, which may be indices, are permuted."""
    if tensor.is_floating_point() and tensor.element_size() > 1:  # float8 has no arithmetic
        return 1 - tensor
    other = tensor.clone()
    as_bytes(other).copy_(as_bytes(tensor).roll(tensor.element_size()))
    return other


def _after(replay: Callable[[], None], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Replay once and return copies of the outputs."""
    replay()
    return [output.clone() for output in outputs]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor's bytes in memory order."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of equal strides are bit-identical."""
    return torch.equal(as_bytes(one), as_bytes(other))
