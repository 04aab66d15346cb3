"""The CUDA driver API, for calls that PyTorch does not expose."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def cuda_driver() -> Any:
    """Load the CUDA driver library; return None if it is missing (AMD, CPU only)."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
