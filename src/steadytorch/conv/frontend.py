"""Import the optional cuDNN frontend package, and describe devices to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

from steadytorch.device.probes import CUDNN_EXTRA, CUDNN_FRONTEND
from steadytorch.errors import UnsupportedError, first_line


class Target(msgspec.Struct, frozen=True):
    """Device that cuDNN plans are for: a device of this machine, or a described other device.

    Attributes:
        handle: cuDNN handle on the device; None for a description.
        described: the frontend's device properties; None for a device of this machine.
        capability: compute capability, e.g. `9.0`.
    """

    handle: int | None
    described: Any
    capability: str


@functools.cache
def frontend() -> ModuleType:
    """Import the frontend.

    Raises:
        UnsupportedError: the frontend or cuDNN is missing or has an unsupported version.
    """
    need = f"choosing cuDNN engines needs nvidia-cudnn-frontend {CUDNN_FRONTEND}"
    remedy = f"pip install '{CUDNN_EXTRA}'"
    try:
        import cudnn
    except ImportError as error:
        raise UnsupportedError(f"{need} ({error}): {remedy}") from None
    found = getattr(cudnn, "__version__", "unknown")
    if not found.startswith(CUDNN_FRONTEND + "."):
        raise UnsupportedError(f"{need}, found {found}: {remedy}")
    _check_library(cudnn)
    return cudnn


def _check_library(cudnn: Any) -> None:
    import torch

    try:
        here = int(cudnn.backend_version())
    except Exception as error:
        raise UnsupportedError(
            f"cuDNN cannot be loaded ({error}): install a PyTorch with CUDA"
        ) from None
    of_torch = torch.backends.cudnn.version()
    if of_torch is not None and of_torch != here:
        raise UnsupportedError(
            f"the frontend loads cuDNN {here}, but PyTorch uses {of_torch}: remove the other one "
            "from LD_LIBRARY_PATH, or uninstall it"
        )


def version() -> int:
    """Version of cuDNN as a number: 91900 is 9.19.0.

    Raises:
        UnsupportedError: see `frontend`.
    """
    return int(frontend().backend_version())


def describe(properties: Mapping[str, Any]) -> Target:
    """Make a `Target` for another device, for which plans can be listed and built, but not run.

    Args:
        properties: device properties, by their names in cuDNN's JSON (cuDNN 9.8 or newer).

    Raises:
        UnsupportedError: see `frontend`; or cuDNN rejects the description.
    """
    text = msgspec.json.encode(dict(properties)).decode()
    try:
        described = frontend().create_device_properties(text)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"cuDNN {version()} rejects the device description: {first_line(error)}"
        ) from None
    number = int(properties.get("deviceVer", 0))
    return Target(None, described, f"{number // 100}.{number % 100 // 10}")
