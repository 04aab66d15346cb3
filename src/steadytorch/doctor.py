"""Check of the machine before a measurement."""

from __future__ import annotations

from steadytorch.device.facts import load_facts, resolve_device
from steadytorch.device.probes import observability
from steadytorch.device.telemetry import snapshot
from steadytorch.measure.noise import noise_floor
from steadytorch.results.machine import CheckUp
from steadytorch.runtime.switch import read_switch
from steadytorch.transforms.plugin_worker import check_all


def doctor(device: str = "auto", plugins: bool = False) -> CheckUp:
    """Checks the machine before a measurement; takes a few seconds.

    Needs no privileges and changes nothing. Times a matrix product in this process.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:i`.
        plugins: whether to check each installed plug-in, in a process of its own.

    Raises:
        UsageError: `device` is malformed.
        UnsupportedError: the device is missing.
    """
    resolved = resolve_device(device)
    return CheckUp(
        environment=load_facts(resolved),
        state=snapshot(resolved),
        observability=observability(resolved),
        noise_floor=noise_floor(resolved),
        benchmark_mode=read_switch(),
        plugins=check_all(resolved) if plugins else None,
    )
