"""Provokes synchronous-copy: an extension copies with `cudaMemcpy`, which returns when it is done.

PyTorch itself always copies by `cudaMemcpyAsync`; extensions and bindings often do not. `mended`
copies the same pinned memory through PyTorch.

    steady explain examples/synchronous_copy.py:slow --device cuda
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

HOST_TO_DEVICE = 1


class Fed(nn.Module):
    """Copies its batch to the device in one way or the other, then multiplies matrices there."""

    def __init__(self, synchronous: bool) -> None:
        super().__init__()
        self.synchronous = synchronous
        self.batch = torch.randn(512, 1024)  # an attribute, no buffer: it stays with the host

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
    """A copy as an extension makes it: by CUDA's runtime library, which PyTorch has loaded."""
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
