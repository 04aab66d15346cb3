"""NVML access: sessions, and live readings of one GPU.

GPUs are looked up by UUID, because CUDA numbers only the visible devices (CUDA_VISIBLE_DEVICES) and
NVML numbers all devices.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from steadytorch.device.observe import NotObservable

_SM_CLOCK = 1
_GPU_SENSOR = 0
_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13

# Clearer messages for NVML error codes whose stock text is unhelpful.
_REASONS = {
    _NOT_SUPPORTED: "this GPU or its virtual machine does not report it",
    4: "no permission to read it from NVML",
    9: "the NVIDIA kernel driver is not loaded",
    12: "the NVML library (libnvidia-ml) is not installed",
    18: "the NVML library and the loaded driver have different versions",
}

# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML reference, "NvmlClocksEventReasons").
CLOCK_EVENT_REASONS = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal_slowdown",
    0x40: "hardware_thermal_slowdown",
    0x80: "hardware_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability_limit",
}


class Nvml:
    """An initialised NVML library; a failed `call` raises `NotObservable` with a clear reason."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, names: str | tuple[str, ...], *arguments: Any) -> Any:
        """Call the first function of `names` that both the bindings and the driver provide.

        Raises:
            NotObservable: No function is available, or the call failed.
        """
        names = (names,) if isinstance(names, str) else names
        for name in names:
            function = getattr(self._library, name, None)
            if function is None:
                continue
            try:
                value = function(*arguments)
            except self._library.NVMLError as error:
                if getattr(error, "value", None) == _FUNCTION_NOT_FOUND:
                    continue
                raise NvmlRefusal(error) from None
            # Bindings before 11.5 return bytes.
            return value.decode(errors="replace") if isinstance(value, bytes) else value
        raise NotObservable(f"nvidia-ml-py or the driver is too old for {names[0]}")


class NvmlRefusal(NotObservable):
    """A failed NVML call; `code` is NVML's error code."""

    def __init__(self, error: Exception) -> None:
        self.code = getattr(error, "value", None)
        super().__init__(_REASONS.get(self.code or 0) or f"NVML error: {error}")


class NvmlGpu:
    """Live readings of one GPU or MIG slice; each reading may raise `NotObservable`.

    An instance is valid while its NVML session is open. Each reading takes tens of microseconds.
    """

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._is_slice = False
        # NVML reports clocks, power and temperature for whole GPUs only.
        self._whole = handle
        with suppress(NotObservable):
            self._is_slice = bool(nvml.call("nvmlDeviceIsMigDeviceHandle", handle))
        if self._is_slice:
            self._whole = nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def mig_profile(self) -> str | None:
        """Name of the MIG slice ("1g.10gb"); None for a whole GPU."""
        if self._is_slice:
            return mig_profile_in(self._nvml.call("nvmlDeviceGetName", self._handle))
        try:
            current, _pending = self._nvml.call("nvmlDeviceGetMigMode", self._handle)
        except NvmlRefusal as refusal:
            if refusal.code == _NOT_SUPPORTED:
                return None
            raise
        if current:
            raise NotObservable("MIG mode is on, but the slice of this process is not visible")
        return None

    def sm_clock_mhz(self) -> int:
        """Current SM clock."""
        return self._nvml.call("nvmlDeviceGetClockInfo", self._whole, _SM_CLOCK)

    def sm_clock_max_mhz(self) -> int:
        """Maximum SM clock."""
        return self._nvml.call("nvmlDeviceGetMaxClockInfo", self._whole, _SM_CLOCK)

    def power_watts(self) -> float:
        """Current power draw of the whole board or module."""
        return self._nvml.call("nvmlDeviceGetPowerUsage", self._whole) / 1000

    def power_limit_watts(self) -> float:
        """Enforced power limit."""
        return self._nvml.call("nvmlDeviceGetEnforcedPowerLimit", self._whole) / 1000

    def temperature_celsius(self) -> int:
        """Temperature of the GPU die."""
        names = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        return self._nvml.call(names, self._whole, _GPU_SENSOR)

    def clock_event_reasons(self) -> tuple[str, ...]:
        """Names of the active clock limits (`CLOCK_EVENT_REASONS`); empty if there are none.

        An unknown bit of the NVML mask gets a name such as "bit_0x1000".
        """
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        mask = int(self._nvml.call(names, self._whole))
        bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
        return tuple(CLOCK_EVENT_REASONS.get(bit, f"bit_{bit:#x}") for bit in bits)

    def memory_free_bytes(self) -> int:
        """Free memory of the GPU or MIG slice."""
        return int(self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle).free)

    def compute_pids(self) -> tuple[int, ...]:
        """Host PIDs of the processes with a compute context on the GPU."""
        processes = self._nvml.call("nvmlDeviceGetComputeRunningProcesses", self._handle)
        return tuple(process.pid for process in processes)


@contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """Open an NVML session and close it on exit.

    Args:
        library: Module with the functions of nvidia-ml-py; None imports `pynvml`.

    Raises:
        NotObservable: The bindings, the library, the driver or the permission is missing.
    """
    nvml = Nvml(library if library is not None else _bindings())
    nvml.call(("nvmlInit", "nvmlInit_v2"))
    try:
        yield nvml
    finally:
        with suppress(NotObservable):
            nvml.call("nvmlShutdown")


@contextmanager
def open_gpu(uuid: str, index: int, library: Any = None) -> Iterator[NvmlGpu]:
    """Open one GPU in an NVML session of its own.

    Args:
        uuid: UUID as CUDA reports it.
        index: CUDA index among the visible devices.
        library: See `open_nvml`.

    Raises:
        NotObservable: See `open_nvml`; or NVML does not list this GPU.
    """
    with open_nvml(library) as nvml:
        yield find_gpu(nvml, library_uuids(uuid, index))


def find_gpu(nvml: Nvml, uuids: tuple[str, ...]) -> NvmlGpu:
    """Return the GPU of the first UUID in `uuids` that NVML knows.

    Raises:
        NotObservable: NVML knows none of them; the message quotes its last error.
    """
    refusal = NotObservable("the device has no UUID")
    for uuid in uuids:
        try:
            return NvmlGpu(nvml, nvml.call("nvmlDeviceGetHandleByUUID", uuid))
        except NotObservable as error:
            refusal = error
    raise NotObservable(f"NVML does not list this GPU ({refusal})")


def library_uuids(uuid: str, index: int) -> tuple[str, ...]:
    """UUIDs under which NVML may list CUDA device `index`, in order of preference."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible[index].strip() if index < len(visible) else ""
    # Some runtimes report the UUID of the whole GPU for a slice; the variable is more precise.
    slices = (named,) if named.startswith("MIG-") else ()
    return (*slices, f"GPU-{uuid}", f"MIG-{uuid}")


def mig_profile_in(name: str) -> str | None:
    """MIG profile at the end of a device name ("NVIDIA H200 MIG 1g.18gb"), or None."""
    found = re.search(r"\bMIG (\S+)", name)
    return found.group(1) if found else None


def _bindings() -> Any:
    # Superseded distributions of this module warn on import, which fails if warnings are errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import pynvml
        except ImportError:
            raise NotObservable("the Python package nvidia-ml-py is not installed") from None
    return pynvml
