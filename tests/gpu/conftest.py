from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from steadytorch.device.facts import DeviceFacts, load_facts
from steadytorch.transforms import ambient, set_ambient


@pytest.fixture(scope="module")
def facts() -> DeviceFacts:
    return load_facts("cuda")


@pytest.fixture(scope="module")
def ieee() -> Iterator[None]:
    """float32 that is float32, so that what is compared with is exact."""
    found = ambient()
    set_ambient(sys.modules["steadytorch_transforms_contract"].IEEE)
    yield
    set_ambient(found)
