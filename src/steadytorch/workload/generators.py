"""Keeps the caller's random number generators as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def restored() -> Iterator[None]:
    """Restores PyTorch's, NumPy's and Python's generators at the end of the `with` block.

    Of GPUs, only generators that existed at its beginning are restored.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
