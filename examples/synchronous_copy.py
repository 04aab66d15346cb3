"""Provokes synchronous-copy: an extension copies with `cudaMemcpy`, which blocks the host.

PyTorch itself always uses `cudaMemcpyAsync`; extensions and bindings often do not. `mended` copies
the same pinned memory through PyTorch.

    steady explain examples/synchronous_copy.py:slow --device cuda
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

HOST_TO_DEVICE = 1


class Fed(nn.Module):
    """Copies its batch to the device, synchronously or not, then multiplies matrices."""

    def __init__(self, synchronous: bool) -> None:
        super().__init__()
        self.synchronous = synchronous
        self.batch = torch.randn(512, 1024)  # not a buffer, so it stays on the host

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.batch.is_pinned():
            self.batch = self.batch.pin_memory()
        if self.synchronous:
            batch = copied(self.batch, x.device)
        else:
            batch = self.batch.to(x.device, non_blocking=True)
        for _ in range(40):
            y = x @ x
        return batch, y


def copied(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy as an extension would, with the CUDA runtime library that PyTorch has loaded."""
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    result = torch.empty_like(host, device=device)
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (result, host))
    failed = runtime.cudaMemcpy(*addresses, ctypes.c_size_t(host.nbytes), HOST_TO_DEVICE)
    if failed:
        raise RuntimeError(f"cudaMemcpy failed with error {failed}")
    return result


def slow() -> tuple[nn.Module, torch.Tensor]:
    return Fed(synchronous=True), torch.randn(4096, 4096, dtype=torch.bfloat16)


def mended() -> tuple[nn.Module, torch.Tensor]:
    return Fed(synchronous=False), torch.randn(4096, 4096, dtype=torch.bfloat16)
