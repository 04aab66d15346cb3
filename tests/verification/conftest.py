from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def process_settings():
    """Making a reference sets the process's precisions: here they are put back."""
    import torch

    owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    found = [owner.fp32_precision for owner in owners]
    yield
    for owner, value in zip(owners, found, strict=True):
        owner.fp32_precision = value
