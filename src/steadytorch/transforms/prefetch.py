"""Batches copied to the device while it computes on the one before.

A plain `batch.to(device)` from pageable memory makes the host wait for the copy, and puts the copy
in the stream of the computation, so that neither overlaps with anything. Here a batch goes through
page-locked memory and a stream of its own, and is asked for one iteration ahead.
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
    """Takes the batches of a workload's loader one step ahead.

    The model and what it is given stay as they are. It stands for `steadytorch.prefetch` around the
    loader of the caller's loop; a model alone, without a loader, it leaves as it is.
    """

    name = "prefetch"
    risk = Risk.EXACT

    def applies_to(self, workload: Workload, facts: DeviceFacts) -> Applicable | NotApplicable:
        """Needs CUDA, and a loader whose batches lie in the host's memory."""
        feed = workload.feed
        return decide(
            (feed is None, "the workload carries no loader (Workload.from_loader)"),
            no_cuda(facts),
            (feed is not None and not feed.on_host, "the loader gives no tensors in host memory"),
        )

    @contextmanager
    def applied(self, workload: Workload) -> Iterator[Workload]:
        """Yields the workload fed ahead; on leaving drops the batch under way, and the loader."""
        if workload.feed is None:
            yield workload
            return
        ahead = Prefetched(workload.feed.loader, own_device(workload))
        try:
            yield replace(workload, feed=replace(workload.feed, loader=ahead))
        finally:
            ahead.close()


class Delivered(Generic[BatchT]):
    """A loader whose batches are moved to a device when they are asked for.

    Args:
        loader: where batches come from.
        device: where they go.
    """

    def __init__(self, loader: Iterable[BatchT], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __len__(self) -> int:
        """As many batches as the loader says that it has.

        Raises:
            TypeError: it does not say.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[BatchT]:
        """Batches in the loader's order."""
        for batch in self._loader:
            yield pytree.tree_map_only(torch.Tensor, self._sent, batch)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


class Prefetched(Delivered[BatchT]):
    """A loader whose batches arrive on a device ahead of time; see `runtime.prefetch`.

    Args:
        loader: where batches come from.
        device: where they go.
    """

    def __init__(self, loader: Iterable[BatchT], device: torch.device) -> None:
        super().__init__(loader, device)
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()

    def __iter__(self) -> Iterator[BatchT]:
        """Batches in the loader's order; an exception of the loader comes where its batch would."""
        batches = iter(self._loader)
        if self._device.type != "cuda":
            return batches
        coming = _ahead(batches, self._device)
        self._running.add(coming)
        return coming

    def close(self) -> None:
        """Ends all iterations, each with the batch that is under way."""
        for coming in list(self._running):
            coming.close()


def _ahead(batches: Iterator[BatchT], device: torch.device) -> Iterator[BatchT]:
    """Yields batches with the next one always under way."""
    stream = torch.cuda.Stream(device)
    try:
        coming = _Arrival(batches, stream)
        while not coming.is_last:
            coming.give_back()
            # Asked for before the consumer gets its own, so that the copy overlaps with its work.
            now, coming = coming, _Arrival(batches, stream)
            yield now.taken()
        coming.finish()
    finally:
        # An early end: a generator's own clean-up runs now, not when it is found to be garbage.
        if (close := getattr(batches, "close", None)) is not None:
            close()


class _Arrival:
    """What the loader gave when asked once: a batch under way, an exception, or the end."""

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
            # Memory that is page-locked already is left alone, and is the loader's.
            tensor = tensor.pin_memory()
        # The allocator keeps page-locked memory until the copies from it are done.
        return tensor.to(device, non_blocking=True)

    def give_back(self) -> None:
        """Waits until memory of the loader's own was read, which it may write a next batch to."""
        if self._lent:
            self._copied.synchronize()

    def taken(self) -> Any:
        """The batch, safe to use on the stream that is current for the caller."""
        stream = torch.cuda.current_stream(self._copied.device)
        stream.wait_event(self._copied)

        def lend(tensor: torch.Tensor) -> None:
            # Its memory belongs to the copying stream, and must not be reused there too early.
            if tensor.device == stream.device:
                tensor.record_stream(stream)

        pytree.tree_map_only_(torch.Tensor, lend, self._batch)
        batch, self._batch = self._batch, None
        return batch

    def finish(self) -> None:
        """Raises what the loader raised."""
        if self._error is not None:
            raise self._error
