"""The transform `prefetch` for a caller's own loop and loader."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from steadytorch.device.facts import resolve_device
from steadytorch.transforms.prefetch import BatchT, Prefetched


def prefetch(
    loader: Iterable[BatchT], device: str | torch.device | None = None
) -> Prefetched[BatchT]:
    """Iterates over a loader's batches and copies each to the device one step ahead.

    The copy of a batch overlaps with the computation on the previous one, so two batches are on the
    device at a time. Order is kept, and the consumer may keep batches. The loader runs in the
    caller's thread, one batch ahead; a slow loader should use its own workers. On a CPU, batches
    are passed on unchanged.

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
