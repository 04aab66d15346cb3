"""The CUDA driver's own interface, for what PyTorch has none for."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def cuda_driver() -> Any:
    """The driver's library; None where there is none (AMD)."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
