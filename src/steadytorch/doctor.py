"""The check-up of a machine: what it is, how it is now, and what cannot be observed on it."""

from __future__ import annotations

import msgspec

from steadytorch.device.facts import DeviceFacts, load_facts, resolve_device
from steadytorch.device.probes import Observation, observability
from steadytorch.device.telemetry import Snapshot, snapshot
from steadytorch.measure.noise import NoiseFloor, noise_floor
from steadytorch.runtime.switch import Switch, read_switch


class CheckUp(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as it was found.

    Attributes:
        environment: what does not change: device, versions, cores.
        state: what does: load, clocks, power, memory that is free.
        observability: what can be observed, and what to do about the rest.
        noise_floor: how far two measurements of the same thing are apart here.
        benchmark_mode: cuDNN's switch in this process, and its traps.
    """

    environment: DeviceFacts
    state: Snapshot
    observability: list[Observation]
    noise_floor: NoiseFloor
    benchmark_mode: Switch


def doctor(device: str = "auto") -> CheckUp:
    """Looks the machine over before anything on it is measured; takes seconds.

    Needs no privileges and changes nothing. A matrix product is timed in this process.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:i`.

    Raises:
        UsageError: `device` is malformed.
        UnsupportedError: the device is not there.
    """
    resolved = resolve_device(device)
    return CheckUp(
        environment=load_facts(resolved),
        state=snapshot(resolved),
        observability=observability(),
        noise_floor=noise_floor(resolved),
        benchmark_mode=read_switch(),
    )
