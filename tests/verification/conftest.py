from __future__ import annotations

from contextlib import contextmanager

import pytest


@contextmanager
def kept_settings():
    """Puts back the process's precisions, which making a reference sets."""
    import torch

    owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    found = [owner.fp32_precision for owner in owners]
    try:
        yield
    finally:
        for owner, value in zip(owners, found, strict=True):
            owner.fp32_precision = value


@pytest.fixture(autouse=True)
def process_settings():
    with kept_settings():
        yield
