"""Batches for a caller's own loop: the transform `prefetch`, applied to its loader."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from steadytorch.device.facts import resolve_device
from steadytorch.transforms.prefetch import BatchT, Prefetched


def prefetch(
    loader: Iterable[BatchT], device: str | torch.device | None = None
) -> Prefetched[BatchT]:
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
    target = resolve_device("auto" if device is None else str(device))
    return Prefetched(loader, torch.device(target))
