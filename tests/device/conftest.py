from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

UUID = "11111111-2222-3333-4444-555555555555"


class FakeNvml:
    """Fake NVML of one idle H200; `answers` overrides results by function.

    An answer that is a number of the library's own error codes in `refused` is raised instead, and
    a function in `missing` does not exist.
    """

    NVMLError = pynvml.NVMLError

    def __init__(
        self,
        *,
        refused: dict[str, int] | None = None,
        missing: tuple[str, ...] = (),
        **answers: Any,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._refused = refused or {}
        self._answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetHandleByUUID": {f"GPU-{UUID}": "gpu"},
            "nvmlDeviceIsMigDeviceHandle": 0,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetClockInfo": 345,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 76_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 31,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096, free=149_000_000_000),
            "nvmlDeviceGetComputeRunningProcesses": [],
            **answers,
        }
        for name in missing:
            del self._answers[name]

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((name, *arguments))
        if name in self._refused:
            raise pynvml.NVMLError(self._refused[name])
        answer = self._answers[name]
        if isinstance(answer, dict):
            if arguments[0] not in answer:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return answer[arguments[0]]
        return answer


@pytest.fixture
def fake_nvml():
    return FakeNvml


@pytest.fixture
def gpu_uuid():
    return UUID


@pytest.fixture
def no_library():
    """Bindings without the NVML library."""
    return FakeNvml(refused={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})


@pytest.fixture
def cuda_h200(monkeypatch):
    """Fakes PyTorch with one H200; tests may change the properties."""
    import torch

    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=150_109_880_320,
        L2_cache_size=62_914_560,
        uuid=UUID,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return properties
