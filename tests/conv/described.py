"""A GPU described to cuDNN, so that plans can be listed and built without one."""

from __future__ import annotations

import pytest

from steadytorch.conv import engines, frontend
from steadytorch.errors import UnsupportedError

H200 = {
    "deviceName": "NVIDIA H200",
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "driverVer": 13000,
    "multiProcessorCount": 132,
    "totalGlobalMem": 150109880320,
    "l2CacheSize": 62914560,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxCtasPerSM": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "maxSharedMemoryPerSM": 233472,
    "pciDeviceId": 9013,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
}


def target() -> frontend.Target:
    """The description as a target; skips if the libraries are not installed."""
    try:
        described = frontend.describe(H200)
        engines.Graph(_any_problem(), described)
    except UnsupportedError as error:
        pytest.skip(f"plans cannot be listed here: {error}")
    return described


def _any_problem():
    from steadytorch.conv.problem import parse

    return parse("fprop/none/fp16/last/i8x64x14x14/w64x64x1x1/s1x1/p0x0/d1x1/g1")
