"""Batches copied to the device while it computes on the one before.

A plain `batch.to(device)` from pageable memory makes the host wait for the copy, and puts the copy
in the stream of the computation, so that neither overlaps with anything. Here a batch goes through
page-locked memory and a stream of its own, and is asked for one iteration ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

from steadytorch.device.facts import resolve_device

BatchT = TypeVar("BatchT")


def prefetch(
    loader: Iterable[BatchT], device: str | torch.device | None = None
) -> Prefetch[BatchT]:
    """Iterates over a loader's batches, each on the device by the time it is worked on.

    The copy of a batch runs beside the computation on the batch before: two are on the device at a
    time. Batches come in order and are the consumer's to keep. What computes batches on the host
    runs in the caller's thread, one batch ahead: a loader that is slow at it should have workers of
    its own. On a CPU the batches are passed on as they are.

    Args:
        loader: any iterable; a fresh iterator is taken for each iteration over the result. Tensors
            within tuples, lists, dicts, named tuples and whatever else is registered with
            `torch.utils._pytree` are moved; everything else is passed on.
        device: where batches are wanted; None for the current CUDA device, or the CPU without one.

    Raises:
        UnsupportedError: that device is not there.
        UsageError: no such kind of device.
    """
    return Prefetch(loader, torch.device(resolve_device("auto" if device is None else str(device))))


class Prefetch(Generic[BatchT]):
    """A loader whose batches arrive on a device; see `prefetch`.

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
        """Batches in the loader's order; an exception of the loader comes where its batch would."""
        batches = iter(self._loader)
        return batches if self._device.type != "cuda" else _ahead(batches, self._device)


def _ahead(batches: Iterator[BatchT], device: torch.device) -> Iterator[BatchT]:
    """Yields batches with the next one always under way."""
    stream = torch.cuda.Stream(device)
    try:
        coming = _Arrival(batches, stream)
        while not coming.is_last:
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
        self.is_last = False
        try:
            batch = next(batches)
            with torch.cuda.stream(stream):
                self._batch = pytree.tree_map_only(torch.Tensor, self._sent(stream), batch)
            self._copied = stream.record_event()
        except StopIteration:
            self.is_last = True
        except Exception as error:
            self.is_last, self._error = True, error

    @staticmethod
    def _sent(stream: torch.cuda.Stream) -> Any:
        def send(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == stream.device:
                return tensor
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()
            # The allocator keeps page-locked memory until the copies from it are done.
            return tensor.to(stream.device, non_blocking=True)

        return send

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
