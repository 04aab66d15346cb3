"""The check-up of a machine: what it is, how it is now, and what cannot be observed on it."""

from __future__ import annotations

from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.device.probes import observability
from steadytorch.device.telemetry import snapshot
from steadytorch.measure.noise import noise_floor
from steadytorch.results.machine import CheckUp
from steadytorch.runtime.switch import read_switch


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
