"""Record CUDA graphs, and restore PyTorch's state if a recording fails."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from steadytorch.errors import first_line


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Records the GPU work of the `with` block into a graph, without executing it.

    If the recording fails, the current stream and the random number generator are restored. A
    generator that is not restored refuses to draw ("Offset increment outside graph capture").

    Args:
        graph: to record into.
        pool: whose memory it uses, from `torch.cuda.graph_pool_handle`.
        stream: to record on; not the default one.
    """
    try:
        with (
            collector_paused(),
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    except BaseException:
        _end_allocations(graph, stream)
        restore_generator(stream)
        raise


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect garbage, then disable the garbage collector inside the `with` block.

    A garbage collection may free device memory, which CUDA forbids during a recording. Does nothing
    if the garbage collector is already disabled.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _end_allocations(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Tell PyTorch's allocator that a failed recording has ended, in case PyTorch did not."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):  # already ended
            end(stream.device.index, graph.pool())


def restore_generator(stream: torch.cuda.Stream) -> None:
    """Make the device's random number generator usable again after a failed recording.

    The generator leaves capture mode only when a recording ends without error. A trivial graph is
    recorded to end capture mode; the generator's seed and offset are preserved.
    """
    torch.cuda.synchronize(stream.device)
    state = torch.cuda.get_rng_state(stream.device)
    graph, held = torch.cuda.CUDAGraph(), torch.zeros((), device=stream.device)
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        held.add_(0)
    torch.cuda.set_rng_state(state, stream.device)
    graph.reset()


def release_frames(error: BaseException, around: BaseException | None = None) -> None:
    """Clear the stack frames of a failed recording, which keep its autograd graph alive.

    If parts of a failed recording's autograd graph survive, PyTorch warns in a later backward pass.

    Args:
        error: what the recording raised.
        around: the caller's exception, already being handled when the recording began; its frames
            are kept. None if there was none.
    """
    for each in _contexts(error, around):
        traceback.clear_frames(each.__traceback__)
    gc.collect()


def first_cause(error: BaseException, around: BaseException | None = None) -> str:
    """First line of the original error; ending a broken recording raises further errors.

    Args:
        error: what the recording raised.
        around: what was being handled when it began; None for nothing.
    """
    *_, first = _contexts(error, around)
    return first_line(first)


def _contexts(error: BaseException, around: BaseException | None) -> Iterator[BaseException]:
    held: BaseException | None = error
    while held is not None and held is not around:
        yield held
        held = held.__context__
