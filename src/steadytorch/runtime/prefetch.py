"""Prefetches a data loader's batches to the GPU, for the caller's own loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from steadytorch.device.facts import resolve_device
from steadytorch.transforms.prefetch import BatchT, Prefetched


def prefetch(
    loader: Iterable[BatchT], device: str | torch.device | None = None
) -> Prefetched[BatchT]:
    """Iterates over a loader and copies each batch to the device one step ahead.

    The copy of a batch overlaps with computation on the previous batch, so two batches are on the
    device at a time. Batches keep their order and stay valid for as long as the caller holds them.
    The loader runs in the caller's thread, one batch ahead; a slow loader should use worker
    processes. If the device is a CPU, batches pass through unchanged.

    Args:
        loader: any iterable; each iteration over the result takes a fresh iterator. Tensors in
            tuples, lists, dicts, named tuples and other types known to `torch.utils._pytree` are
            moved; all other values are passed on.
        device: the target device; None for the current CUDA device, or the CPU without CUDA.

    Raises:
        UnsupportedError: this machine lacks the device.
        UsageError: the device type is unknown.
    """
    target = resolve_device("auto" if device is None else str(device))
    return Prefetched(loader, torch.device(target))
