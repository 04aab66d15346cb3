from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from steadytorch.plan.fingerprint import Key
from steadytorch.plan.store import Store

from ..serve.plans import make_model, make_plan

KEY = Key(
    workload="0" * 64,
    signature="64x3x224x224:float32",
    inputs={"[0]": "[64, 3, 224, 224] float32 strides [150528, 50176, 224, 1] on cuda"},
    objective="latency",
    precision="same",
    tolerance=0.01,
    max_memory_bytes=8 << 30,
    ambient={"cudnn.benchmark": "False"},
    device="cuda",
    device_name="NVIDIA H200",
    compute_capability="9.0",
    sm_count=132,
    mig_profile=None,
    cores_logical=None,
    isa="AVX512",
    torch="2.13.0",
    cuda="13.0",
    cudnn="9.19.0",
    triton="3.7.0",
    driver="590.44",
    rules=1,
)


@pytest.fixture(scope="session")
def key() -> Key:
    return KEY


class Payload(msgspec.Struct):
    number: int
    text: str = ""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "plans")


@pytest.fixture
def path(store: Store, key: Key) -> Path:
    """The file of a stored payload."""
    path = store.put(key, Payload(1))
    assert path is not None
    return path


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def x():
    return torch.ones(1, 3, 8, 8)


@pytest.fixture
def plan(model, x):
    return make_plan(model, x)
