"""Facts that do not change while a process runs: device, processor and software versions."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Any

import psutil

from steadytorch.device import host
from steadytorch.device.nvml import mig_profile_in, open_gpu, open_nvml
from steadytorch.device.observe import NOT_ON_CPU, NotObservable, Readings
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.results.machine import DeviceFacts

_GPU_FIELDS = ("compute_capability", "sm_count", "l2_cache_bytes", "mig_profile", "driver")
_TRITON_PACKAGES = ("triton", "pytorch-triton")


def parse_device(device: str) -> tuple[str, int]:
    """Split a device name such as "cpu" or "cuda:1" into kind and index (0 by default).

    Raises:
        UsageError: `device` has another form.
    """
    found = re.fullmatch(r"(cpu)|cuda(?::(0|[1-9][0-9]{0,3}))?", device, re.ASCII)
    if found is None:
        raise UsageError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:0, cuda:1, ...")
    return ("cpu", 0) if found.group(1) else ("cuda", int(found.group(2) or 0))


def resolve_device(request: str) -> str:
    """Resolve "auto" to "cuda" or "cpu", and check that a requested GPU exists.

    Args:
        request: "auto", "cpu", "cuda" or "cuda:i".

    Raises:
        UnsupportedError: CUDA or the requested device is not available; the message says why.
        UsageError: `request` has another form.
    """
    import torch

    if request == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, index = parse_device(request)
    if kind == "cpu":
        return request
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device {request!r} is not available: {_why_no_cuda()}")
    count = torch.cuda.device_count()
    if index >= count:
        raise UnsupportedError(
            f"device {request!r} is not available: PyTorch sees {count} "
            f"GPU{'s' if count > 1 else ''}, the last is cuda:{count - 1}"
        )
    return request


def load_facts(device: str, *, library: Any = None) -> DeviceFacts:
    """Collect facts about the machine, without privileges or network.

    An unreadable field becomes None, with a reason; the other fields are unaffected.

    Args:
        device: "cpu", "cuda" or "cuda:i"; the fields of a missing GPU stay unknown.
        library: Replacement for nvidia-ml-py; None imports it.

    Raises:
        UsageError: `device` is malformed.
    """
    kind, index = parse_device(device)
    readings = Readings()
    fields = {**_host_fields(readings), **_software_fields(readings)}
    if kind == "cuda":
        fields |= _gpu_fields(index, readings, library)
    else:
        fields |= {"memory_bytes": readings.read("memory_bytes", _main_memory_bytes)}
        fields |= {"name": fields["cpu_name"]}
        readings.refuse(_GPU_FIELDS, NOT_ON_CPU)
        if fields["name"] is None:
            readings.refuse(("name",), readings.unknown["cpu_name"])
    return DeviceFacts(device=kind, unknown=readings.unknown, **fields)


def _host_fields(readings: Readings) -> dict[str, Any]:
    sources = {
        "cores_physical": host.usable_physical_cores,
        "cores_logical": host.usable_logical_cores,
        "cpu_name": host.cpu_model,
        "os": _operating_system,
        "python": platform.python_version,
    }
    return {field: readings.read(field, source) for field, source in sources.items()}


def _software_fields(readings: Readings) -> dict[str, Any]:
    sources = {
        "torch": _torch_version,
        "cuda": _cuda_version,
        "cudnn": _cudnn_version,
        "triton": _triton_version,
        "isa": _cpu_capability,
    }
    return {field: readings.read(field, source) for field, source in sources.items()}


def _gpu_fields(index: int, readings: Readings, library: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"driver": readings.read("driver", lambda: driver_version(library))}
    properties = readings.read("name", lambda: gpu_properties(index))
    if properties is None:
        absent = ("compute_capability", "sm_count", "l2_cache_bytes", "memory_bytes", "mig_profile")
        readings.refuse(absent, readings.unknown["name"])
        return fields
    capability = f"{properties.major}.{properties.minor}"
    return fields | {
        "name": properties.name,
        "compute_capability": capability,
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_cache_bytes": readings.read("l2_cache_bytes", lambda: properties.L2_cache_size),
        "mig_profile": readings.read(
            "mig_profile", lambda: _mig_profile(properties, index, library)
        ),
    }


def gpu_properties(index: int) -> Any:
    """PyTorch's properties of CUDA device `index`.

    Raises:
        NotObservable: CUDA is not available; the message says why.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotObservable(_why_no_cuda())
    return torch.cuda.get_device_properties(index)


def _mig_profile(properties: Any, index: int, library: Any) -> str | None:
    profile = mig_profile_in(properties.name)
    if profile is not None:
        return profile
    with open_gpu(str(properties.uuid), index, library) as gpu:
        return gpu.mig_profile()


def driver_version(library: Any = None) -> str:
    """The version of the NVIDIA driver, from NVML or else from the kernel module.

    Raises:
        NotObservable: neither is there.
    """
    try:
        with open_nvml(library) as nvml:
            return nvml.call("nvmlSystemGetDriverVersion")
    except NotObservable as refusal:
        try:
            return host.nvidia_driver_version()
        except NotObservable:
            raise refusal from None


def _why_no_cuda() -> str:
    """Explain why `torch.cuda.is_available()` is false, and what to do."""
    import os

    import torch

    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) was built without CUDA; install a CUDA build"
    readings = Readings()
    driver = readings.read("driver", driver_version)
    if driver is None:
        return f"no NVIDIA driver found ({readings.unknown['driver']}); install one"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f"driver {driver} is loaded, but CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU; "
            "unset it or name an existing GPU"
        )
    return (
        f"driver {driver} is loaded, but CUDA {torch.version.cuda} finds no usable device; "
        "check `nvidia-smi` and whether the driver is new enough"
    )


def _main_memory_bytes() -> int:
    return psutil.virtual_memory().total


def _operating_system() -> str:
    system = platform.uname()
    return f"{system.system} {system.release} {system.machine}"


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _cuda_version() -> str:
    import torch

    if torch.version.cuda is None:
        raise NotObservable("this PyTorch was built without CUDA")
    return torch.version.cuda


def _cudnn_version() -> str:
    import torch

    number = torch.backends.cudnn.version()
    if number is None:
        raise NotObservable("this PyTorch was built without cuDNN, or cannot load it")
    return dotted_cudnn(number)


def dotted_cudnn(number: int) -> str:
    """Format cuDNN's version number: 91900 is "9.19.0"; before version 9, 8907 is "8.9.7"."""
    unit = 10_000 if number >= 90_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def _triton_version() -> str:
    # Read the package metadata: importing Triton takes a second.
    for package in _TRITON_PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    raise NotObservable("not installed")


def _cpu_capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()
