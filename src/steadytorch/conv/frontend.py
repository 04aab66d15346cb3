"""The optional package through which cuDNN is asked, and the device that is asked about."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

from steadytorch.device.probes import CUDNN_EXTRA, CUDNN_FRONTEND
from steadytorch.errors import UnsupportedError, first_line


class Target(msgspec.Struct, frozen=True):
    """Where plans are to run: a device at hand, or the description of one.

    Attributes:
        handle: of cuDNN on the device at hand; None for a description.
        described: the frontend's device properties; None for a device at hand.
        capability: compute capability, as `9.0`.
    """

    handle: int | None
    described: Any
    capability: str


@functools.cache
def frontend() -> ModuleType:
    """The frontend's module.

    Raises:
        UnsupportedError: it or cuDNN is missing, or of a version that does not fit.
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
            f"the frontend loads cuDNN {here}, PyTorch has {of_torch}: take the other one off "
            "LD_LIBRARY_PATH, or uninstall it"
        )


def version() -> int:
    """The version of cuDNN as it counts itself: 91900 is 9.19.0.

    Raises:
        UnsupportedError: as `frontend`.
    """
    return int(frontend().backend_version())


def describe(properties: Mapping[str, Any]) -> Target:
    """A target that is not at hand; plans can be listed and built for it, not run.

    Args:
        properties: of the device, by the names that cuDNN's JSON has for them (cuDNN 9.8 or newer).

    Raises:
        UnsupportedError: as `frontend`, or cuDNN takes no such description.
    """
    text = msgspec.json.encode(dict(properties)).decode()
    try:
        described = frontend().create_device_properties(text)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"cuDNN {version()} takes no such device: {first_line(error)}"
        ) from None
    number = int(properties.get("deviceVer", 0))
    return Target(None, described, f"{number // 100}.{number % 100 // 10}")
