"""Recording a CUDA graph, and leaving PyTorch as it was where that fails."""

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
    """Records what runs inside into a graph; nothing of it is executed.

    A recording that fails leaves PyTorch in disorder: the current stream is still the recording
    one, and the random number generator refuses to draw ("Offset increment outside graph capture").
    Both are put right here.

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
    """Collects garbage, then no more: it may free device memory, which CUDA forbids in recordings.

    Within another pause it does nothing.
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
    """Has the allocator take the recording for ended, which a failed one never is."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):  # it was ended after all
            end(stream.device.index, graph.pool())


def restore_generator(stream: torch.cuda.Stream) -> None:
    """Has the device's generator draw again after a recording that failed.

    Ending a recording is what tells the generator that it is over, and a failed one is never ended.
    So an empty one is recorded, which keeps the generator's seed and offset.
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
    """Drops what the frames of a failed recording hold: an autograd graph on the recording stream.

    PyTorch warns where a later backward pass meets what is left of one.

    Args:
        error: what the recording raised.
        around: what was being handled when it began, and is the caller's; None for nothing.
    """
    for each in _contexts(error, around):
        traceback.clear_frames(each.__traceback__)
    gc.collect()


def first_cause(error: BaseException, around: BaseException | None = None) -> str:
    """The first line of the error that came first: ending a broken recording raises another.

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
