"""Current state of the machine: load, memory, clocks, power."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import psutil

from steadytorch.device.facts import gpu_properties, parse_device
from steadytorch.device.nvml import NvmlGpu, open_gpu
from steadytorch.device.observe import NOT_ON_CPU, NotObservable, Readings
from steadytorch.results.machine import Snapshot

# Fields of `Snapshot` and the GPU reading for each.
_GPU_READINGS: dict[str, Callable[[NvmlGpu], Any]] = {
    "gpu_memory_free_bytes": NvmlGpu.memory_free_bytes,
    "sm_clock_mhz": NvmlGpu.sm_clock_mhz,
    "sm_clock_max_mhz": NvmlGpu.sm_clock_max_mhz,
    "power_watts": NvmlGpu.power_watts,
    "power_limit_watts": NvmlGpu.power_limit_watts,
    "temperature_celsius": NvmlGpu.temperature_celsius,
    "clock_event_reasons": NvmlGpu.clock_event_reasons,
}
_GPU_FIELDS = (*_GPU_READINGS, "other_gpu_processes")


class CpuShares(NamedTuple):
    """Fractions of all CPU time; `steal` is None if the system does not count stolen time."""

    busy: float
    steal: float | None


def snapshot(device: str, *, interval_s: float = 0.1, library: Any = None) -> Snapshot:
    """Take a snapshot of the machine's state; takes `interval_s` plus a few milliseconds.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        interval_s: How long to observe the CPU, in seconds.
        library: Replacement for nvidia-ml-py; None imports it.

    Raises:
        UsageError: `device` is malformed.
    """
    kind, index = parse_device(device)
    readings = Readings()
    fields = _host_state(readings, interval_s)
    if kind == "cuda":
        fields |= _gpu_state(readings, index, library)
    else:
        readings.refuse(_GPU_FIELDS, NOT_ON_CPU)
    return Snapshot(device=kind, unknown=readings.unknown, **fields)


def cpu_shares(before: Any, after: Any) -> CpuShares:
    """CPU use between two `psutil.cpu_times()`; waiting for disks counts as idle.

    Raises:
        NotObservable: The counters do not advance, as in some sandboxes.
    """
    spent = {
        field: max(0.0, getattr(after, field) - getattr(before, field)) for field in after._fields
    }
    # On Linux, user and nice already include guest time.
    total = sum(spent.values()) - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
    if total <= 0:
        raise NotObservable("the kernel's CPU time counters do not advance")
    idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
    steal = spent["steal"] / total if "steal" in spent else None
    return CpuShares(busy=min(1.0, max(0.0, 1.0 - idle / total)), steal=steal)


def count_others(pids: Collection[int], own: Collection[int], *, has_context: bool) -> int:
    """Count the processes on a GPU other than this process and its descendants.

    Args:
        pids: PIDs that the driver lists.
        own: PIDs of this process and its descendants, in this process's namespace.
        has_context: Whether this process holds a CUDA context and must therefore be listed.

    Raises:
        NotObservable: The list is empty although this process holds a context.
    """
    others = [pid for pid in pids if pid not in own]
    if not has_context or len(others) < len(pids):
        return len(others)
    if not pids:
        raise NotObservable("the driver's process list omits this process, as in some containers")
    # In a container, the driver lists host PIDs that differ from ours: one of them is this process.
    return len(pids) - 1


def _host_state(readings: Readings, interval_s: float) -> dict[str, Any]:
    shares = readings.read("cpu_busy", lambda: _watch_cpu(interval_s))
    if shares is None:
        readings.refuse(("cpu_steal",), readings.unknown["cpu_busy"])
    elif shares.steal is None:
        readings.refuse(("cpu_steal",), "this operating system does not count stolen time")
    return {
        "load_average_1m": readings.read("load_average_1m", lambda: os.getloadavg()[0]),
        "cpu_busy": shares and shares.busy,
        "cpu_steal": shares and shares.steal,
        "memory_free_bytes": readings.read(
            "memory_free_bytes", lambda: psutil.virtual_memory().available
        ),
    }


def _watch_cpu(interval_s: float) -> CpuShares:
    before = psutil.cpu_times()
    time.sleep(interval_s)
    return cpu_shares(before, psutil.cpu_times())


def _gpu_state(readings: Readings, index: int, library: Any) -> dict[str, Any]:
    try:
        with open_gpu(str(gpu_properties(index).uuid), index, library) as gpu:
            fields = {
                field: readings.read(field, lambda reading=reading: reading(gpu))
                for field, reading in _GPU_READINGS.items()
            }
            fields["other_gpu_processes"] = readings.read(
                "other_gpu_processes",
                lambda: count_others(
                    gpu.compute_pids(), own_pids(), has_context=holds_context(index)
                ),
            )
            return fields
    except Exception as error:
        # A driver can raise anything; see `Readings.read`.
        readings.refuse(_GPU_FIELDS, error)
        return {}


def other_gpu_processes(index: int, library: Any = None) -> int | None:
    """Number of other processes with a compute context on a GPU; None if it cannot be observed.

    Args:
        index: CUDA index of the GPU.
        library: replacement for nvidia-ml-py; None imports it.
    """
    try:
        with open_gpu(str(gpu_properties(index).uuid), index, library) as gpu:
            pids = gpu.compute_pids()
        return count_others(pids, own_pids(), has_context=holds_context(index))
    except NotObservable:
        return None


def own_pids() -> frozenset[int]:
    """PIDs of this process and its descendants."""
    process = psutil.Process()
    return frozenset((process.pid, *(child.pid for child in process.children(recursive=True))))


def holds_context(index: int) -> bool:
    """Whether this process has a CUDA context on device `index`; does not create one."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else torch.cuda.memory_reserved(index) > 0
