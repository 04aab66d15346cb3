"""What shows that kernels of a recorded graph can be pointed at other memory: replays.

Nothing that a replay meets on the way may do harm. Integers, which may be indices, are the same
ones in other places, and what is written where it should not be lies in memory taken for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from steadytorch.graphs.pointers import Fixed, Kernel, Pointer, rest

Around = Callable[[int], range | None]
"""The addresses around one in memory where nobody but graphs looks; None for one elsewhere."""

_SENTINELS = (0, 0xFF, 0x7B)
"""Bytes of zero, of NaN, and of a large number in each floating-point type: what is added to shows.
Zero comes first: it does no harm where it is taken for an index, and what reads it in the place of
something else is not given the others."""
_GUARD_BYTES = 1 << 16
"""Around memory in which outputs are tried; a multiple of how addresses are aligned."""
_MOST_WRITERS = 16
"""Kernels that are tried as those that use an output: each more costs a few replays."""


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

    Raises:
        RuntimeError: the driver refuses to take the address back, or there is no memory for this;
            the graph has to be instantiated anew.
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
    """The kernels that have to be pointed elsewhere for an output to be put there.

    Those that use the output come after all that use what lay in its memory before. So they are the
    last few, with which replays give the same bits and touch nothing else there. Not the fewest:
    one that fills the output may seem idle because these inputs have all of that written over. The
    last of those before, most often, reads what is not there then, and the replay differs.

    Args:
        static: the output, dense; it has the results of a replay when this returns.
        nodes: of the graph, in the order in which they were recorded.
        pointer: makes one of a tensor for some of them.
        replay: runs the graph once.
        outputs: all of the graph's, `static` among them.
        around: of memory that is the graph's own.

    Returns:
        None at all where the output has to be copied out.

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
            return ()  # where the output's begin cannot be told
        if not trial.is_whole(pointer(static, tried)):
            if found:
                break
        elif trial.is_written_by(pointer(static, tried[:1])):
            found = tried
    return found


class _Trial:
    """Replays with an output in other memory.

    Args:
        static: the output.
        replay: runs the graph once.
        outputs: all of the graph's.
        segment: addresses around the output. Kernels that use what lay there before, and are tried
            as well, write to no others, so the other memory is as large.
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
        """Whether results are the same bits with it elsewhere, and nothing else is touched."""
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
        """Whether a kernel, of those with which it is whole, writes there."""
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
    """Other values: integers, which may be indices, are the same ones in other places."""
    if tensor.is_floating_point() and tensor.element_size() > 1:  # one byte has no arithmetic
        return 1 - tensor
    other = tensor.clone()
    as_bytes(other).copy_(as_bytes(tensor).roll(tensor.element_size()))
    return other


def _after(replay: Callable[[], None], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the outputs of a replay."""
    replay()
    return [output.clone() for output in outputs]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order in which they lie, as a view."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of the same strides hold the same bits."""
    return torch.equal(as_bytes(one), as_bytes(other))
