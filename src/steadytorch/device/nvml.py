"""The NVIDIA management library: one session, one GPU, and what can be read from it.

The GPU is found by UUID, because CUDA's index counts only the visible devices
(CUDA_VISIBLE_DEVICES) while the management library counts all of them.
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

# Error codes of NVML whose stock text does not tell a reader what is the matter.
_REASONS = {
    _NOT_SUPPORTED: "this GPU, or the virtual machine around it, does not report it",
    4: "no permission to read it from NVML",
    9: "the NVIDIA kernel driver is not loaded",
    12: "the NVML library (libnvidia-ml) is not installed",
    18: "the NVML library and the loaded driver are of different versions",
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
    """An initialised library; `call` turns each of its failures into a reason."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, names: str | tuple[str, ...], *arguments: Any) -> Any:
        """Calls the first of `names` that both the bindings and the driver know.

        Raises:
            NotObservable: None is known, or the call was refused.
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
        raise NotObservable(f"neither nvidia-ml-py nor the driver offers {names[0]}")


class NvmlRefusal(NotObservable):
    """A call that the library refused; `code` is NVML's own error number."""

    def __init__(self, error: Exception) -> None:
        self.code = getattr(error, "value", None)
        super().__init__(_REASONS.get(self.code or 0) or f"NVML says: {error}")


class NvmlGpu:
    """Live readings of one GPU, or of one MIG slice of it; each raises `NotObservable`.

    Hold one for as long as its session is open: a reading costs tens of microseconds.
    """

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._is_slice = False
        # Clocks, power and temperature belong to the whole GPU and are refused for a slice of it.
        self._whole = handle
        with suppress(NotObservable):
            self._is_slice = bool(nvml.call("nvmlDeviceIsMigDeviceHandle", handle))
        if self._is_slice:
            self._whole = nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def mig_profile(self) -> str | None:
        """Name of the MIG slice ("1g.10gb"), None for a whole GPU."""
        if self._is_slice:
            return mig_profile_in(self._nvml.call("nvmlDeviceGetName", self._handle))
        try:
            current, _pending = self._nvml.call("nvmlDeviceGetMigMode", self._handle)
        except NvmlRefusal as refusal:
            if refusal.code == _NOT_SUPPORTED:
                return None
            raise
        if current:
            raise NotObservable("MIG mode is on, but which slice this process uses is not visible")
        return None

    def sm_clock_mhz(self) -> int:
        """Present clock of the multiprocessors."""
        return self._nvml.call("nvmlDeviceGetClockInfo", self._whole, _SM_CLOCK)

    def sm_clock_max_mhz(self) -> int:
        """Highest clock the multiprocessors can reach."""
        return self._nvml.call("nvmlDeviceGetMaxClockInfo", self._whole, _SM_CLOCK)

    def power_watts(self) -> float:
        """Present power draw of the whole board or module."""
        return self._nvml.call("nvmlDeviceGetPowerUsage", self._whole) / 1000

    def power_limit_watts(self) -> float:
        """Power limit that is in force."""
        return self._nvml.call("nvmlDeviceGetEnforcedPowerLimit", self._whole) / 1000

    def temperature_celsius(self) -> int:
        """Temperature of the GPU die."""
        names = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        return self._nvml.call(names, self._whole, _GPU_SENSOR)

    def clock_event_reasons(self) -> tuple[str, ...]:
        """Why the clock is where it is, by name (`CLOCK_EVENT_REASONS`); empty: nothing holds it.

        A bit without a name here is given as "bit_0x1000".
        """
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        mask = int(self._nvml.call(names, self._whole))
        bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
        return tuple(CLOCK_EVENT_REASONS.get(bit, f"bit_{bit:#x}") for bit in bits)

    def memory_free_bytes(self) -> int:
        """Free device memory, of the slice where there is one."""
        return int(self._nvml.call("nvmlDeviceGetMemoryInfo", self._handle).free)

    def compute_pids(self) -> tuple[int, ...]:
        """Processes with a compute context on the GPU, as the driver numbers them."""
        processes = self._nvml.call("nvmlDeviceGetComputeRunningProcesses", self._handle)
        return tuple(process.pid for process in processes)


@contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """A session of the management library, closed on leaving.

    Args:
        library: A module with the functions of nvidia-ml-py; None imports `pynvml`.

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
    """The GPU that CUDA calls `index`, within a session of its own.

    Args:
        uuid: What CUDA gives as its UUID.
        index: Its place among the devices CUDA sees.
        library: See `open_nvml`.

    Raises:
        NotObservable: As `open_nvml`, or the library does not show this GPU.
    """
    with open_nvml(library) as nvml:
        yield find_gpu(nvml, library_uuids(uuid, index))


def find_gpu(nvml: Nvml, uuids: tuple[str, ...]) -> NvmlGpu:
    """The first of `uuids` that the library knows.

    Raises:
        NotObservable: It knows none of them, with its last answer.
    """
    refusal = NotObservable("the device has no UUID")
    for uuid in uuids:
        try:
            return NvmlGpu(nvml, nvml.call("nvmlDeviceGetHandleByUUID", uuid))
        except NotObservable as error:
            refusal = error
    raise NotObservable(f"NVML does not show this GPU ({refusal})")


def library_uuids(uuid: str, index: int) -> tuple[str, ...]:
    """Names under which the library may know the device that CUDA numbers `index`, best first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible[index].strip() if index < len(visible) else ""
    # Some runtimes give a slice the UUID of the GPU around it; the variable is then more precise.
    slices = (named,) if named.startswith("MIG-") else ()
    return (*slices, f"GPU-{uuid}", f"MIG-{uuid}")


def mig_profile_in(name: str) -> str | None:
    """The MIG profile that a device name ends in ("NVIDIA H200 MIG 1g.18gb"), else None."""
    found = re.search(r"\bMIG (\S+)", name)
    return found.group(1) if found else None


def _bindings() -> Any:
    # Some distributions of this module warn on import that they are superseded: not our caller's
    # concern, and an error where warnings are errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import pynvml
        except ImportError:
            raise NotObservable("the Python package nvidia-ml-py is not installed") from None
    return pynvml
