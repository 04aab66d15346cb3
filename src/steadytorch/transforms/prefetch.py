"""Copies each batch to the device while the device computes on the previous one.

A plain `batch.to(device)` from pageable memory blocks the host and runs in the compute stream, so
nothing overlaps. With prefetching, each batch is requested one iteration ahead and copied from
page-locked memory on a separate stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

from steadytorch.device.facts import DeviceFacts
from steadytorch.rewrite.conversion import own_device
from steadytorch.transforms.base import Applicable, NotApplicable, Risk, Transform
from steadytorch.transforms.traits import decide, no_cuda
from steadytorch.workload.workload import Workload

BatchT = TypeVar("BatchT")


class Prefetch(Transform):
    """Fetches the batches of a workload's loader one step ahead.

    In a training or inference loop, wrap the loader in `steadytorch.prefetch` for the same effect.
    The model and its inputs stay unchanged; a workload without a loader is unaffected.
    """

    name = "prefetch"
    of_loader = True
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA and a loader with batches in host memory."""
        feed = workload.feed
        return decide(
            (feed is None, "the workload has no loader: create it with Workload.from_loader"),
            no_cuda(facts),
            (feed is not None and not feed.on_host, "the loader yields no tensors in host memory"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yield the workload with a prefetching loader; drop the pending batch on exit."""
        if workload.feed is None:
            yield workload
            return
        ahead = Prefetched(workload.feed.loader, own_device(workload))
        try:
            yield replace(workload, feed=replace(workload.feed, loader=ahead))
        finally:
            ahead.close()


class Delivered(Generic[BatchT]):
    """A loader that moves each batch to a device on request, without prefetching.

    Args:
        loader: the source of batches.
        device: the target device.
    """

    def __init__(self, loader: Iterable[BatchT], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __len__(self) -> int:
        """Return the length of the loader.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[BatchT]:
        """Yield batches in the loader's order."""
        for batch in self._loader:
            yield pytree.tree_map_only(torch.Tensor, self._sent, batch)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


class Prefetched(Delivered[BatchT]):
    """A loader whose batches are moved to a device ahead of time; see `runtime.prefetch`.

    Args:
        loader: the source of batches.
        device: the target device.
    """

    def __init__(self, loader: Iterable[BatchT], device: torch.device) -> None:
        super().__init__(loader, device)
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()

    def __iter__(self) -> Iterator[BatchT]:
        """Yield batches in the loader's order; raise the loader's exception in place of a batch."""
        batches = iter(self._loader)
        if self._device.type != "cuda":
            return batches
        coming = _ahead(batches, self._device)
        self._running.add(coming)
        return coming

    def close(self) -> None:
        """End all iterations and drop their pending batches."""
        for coming in list(self._running):
            coming.close()


def _ahead(batches: Iterator[BatchT], device: torch.device) -> Iterator[BatchT]:
    """Yield each batch while the next batch is already being copied to the device."""
    stream = torch.cuda.Stream(device)
    try:
        coming = _Arrival(batches, stream)
        while not coming.is_last:
            coming.give_back()
            # Request the next batch before yielding, so that its copy overlaps with computation.
            now, coming = coming, _Arrival(batches, stream)
            yield now.taken()
        coming.finish()
    finally:
        # On an early exit, run a generator's clean-up now instead of at garbage collection.
        if (close := getattr(batches, "close", None)) is not None:
            close()


class _Arrival:
    """One result of the loader: a pending batch, an exception, or the end."""

    def __init__(self, batches: Iterator[Any], stream: torch.cuda.Stream) -> None:
        self._error: Exception | None = None
        self._batch: Any = None
        self._stream, self._lent = stream, False
        self.is_last = False
        try:
            batch = next(batches)
            with torch.cuda.stream(stream):
                self._batch = pytree.tree_map_only(torch.Tensor, self._sent, batch)
            self._copied = stream.record_event()
        except StopIteration:
            self.is_last = True
        except Exception as error:
            self.is_last, self._error = True, error

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._stream.device
        if tensor.device == device:
            return tensor
        if tensor.device.type == "cpu":
            self._lent |= tensor.is_pinned()
            # Returns the same tensor if it is already pinned; its memory belongs to the loader.
            tensor = tensor.pin_memory()
        # The allocator keeps pinned memory until copies from it have finished.
        return tensor.to(device, non_blocking=True)

    def give_back(self) -> None:
        """Wait for the copy, since the loader may reuse its pinned memory for the next batch."""
        if self._lent:
            self._copied.synchronize()

    def taken(self) -> Any:
        """Return the batch, safe to use on the caller's current stream."""
        stream = torch.cuda.current_stream(self._copied.device)
        stream.wait_event(self._copied)

        def lend(tensor: torch.Tensor) -> None:
            # Keep the copy stream from reusing the memory too early.
            if tensor.device == stream.device:
                tensor.record_stream(stream)

        pytree.tree_map_only_(torch.Tensor, lend, self._batch)
        batch, self._batch = self._batch, None
        return batch

    def finish(self) -> None:
        """Raise the loader's exception, if any."""
        if self._error is not None:
            raise self._error
