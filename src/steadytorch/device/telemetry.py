"""The state of the machine that changes from moment to moment."""

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

# Field of `Snapshot` to the reading that fills it, from one open GPU.
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
    """Fractions of all CPU time between two looks; `steal` is None where the system has none."""

    busy: float
    steal: float | None


def snapshot(device: str, *, interval_s: float = 0.1, library: Any = None) -> Snapshot:
    """Looks at the machine once; takes `interval_s` plus a few milliseconds.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        interval_s: How long the CPU is watched, in seconds.
        library: Stands in for nvidia-ml-py; None imports it.

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
    """What the CPU did between two `psutil.cpu_times()`; waiting for disks counts as idle.

    Raises:
        NotObservable: The counters stand still, as some sandboxes leave them.
    """
    spent = {
        field: max(0.0, getattr(after, field) - getattr(before, field)) for field in after._fields
    }
    # Linux counts a guest's time within user and nice already.
    total = sum(spent.values()) - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
    if total <= 0:
        raise NotObservable("the kernel's CPU time counters do not advance")
    idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
    steal = spent["steal"] / total if "steal" in spent else None
    return CpuShares(busy=min(1.0, max(0.0, 1.0 - idle / total)), steal=steal)


def count_others(pids: Collection[int], own: Collection[int], *, has_context: bool) -> int:
    """How many of the processes on a GPU are not ours.

    Args:
        pids: Processes that the driver lists.
        own: This process and those it started, as this process numbers them.
        has_context: Whether this process itself holds a CUDA context, so that it must be listed.

    Raises:
        NotObservable: This process must be on the list, and the list is empty.
    """
    others = [pid for pid in pids if pid not in own]
    if not has_context or len(others) < len(pids):
        return len(others)
    if not pids:
        raise NotObservable("the driver's process list leaves out even this process (a container)")
    # The driver numbers processes as the host does and we as the container: one of them is us.
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
        # As with any reading: a driver fails in ways no list can foresee.
        readings.refuse(_GPU_FIELDS, error)
        return {}


def own_pids() -> frozenset[int]:
    """This process and all that it started."""
    process = psutil.Process()
    return frozenset((process.pid, *(child.pid for child in process.children(recursive=True))))


def holds_context(index: int) -> bool:
    """Whether this process has a CUDA context on device `index`; creates none."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else torch.cuda.memory_reserved(index) > 0
