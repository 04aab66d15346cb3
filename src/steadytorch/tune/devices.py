"""The devices that share one search: GPUs of one kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from steadytorch.device.facts import gpu_properties, load_facts, parse_device, resolve_device
from steadytorch.device.telemetry import other_gpu_processes
from steadytorch.errors import UsageError
from steadytorch.quantities import size
from steadytorch.results.machine import DeviceFacts

ALL = "all"
_SAME_MEMORY = 0.01
"""Total memory of equal GPUs may differ by less than this fraction, as pages may be retired."""


class Devices(NamedTuple):
    """Devices for one search.

    Attributes:
        names: torch devices of one kind; the first is that of the search.
        left_out: reason by device that is not used.
        notes: one line for each device that is busy.
    """

    names: tuple[str, ...]
    left_out: dict[str, str]
    notes: tuple[str, ...]


def uuid_of(device: str) -> str:
    """UUID of a GPU, which is the same in all processes; empty for a CPU.

    Args:
        device: a torch device string.
    """
    kind, index = parse_device(device)
    return str(gpu_properties(index).uuid) if kind == "cuda" else ""


def choose_devices(
    request: str | Sequence[str],
    device: str | None,
    workload_device: str,
    *,
    count: Callable[[], int] = torch.cuda.device_count,
    facts: Callable[[str], DeviceFacts] = load_facts,
    others: Callable[[int], int | None] = other_gpu_processes,
    resolve: Callable[[str], str] = resolve_device,
) -> Devices:
    """Validates the devices requested for a search, or selects all idle GPUs of one kind.

    Args:
        request: names, in a sequence or separated by commas, or `all` for every idle GPU of the
            kind of `device`.
        device: the device to start from with `all`; None or `auto` for the workload's.
        workload_device: the workload's own device.
        count: number of visible GPUs.
        facts: facts about a device.
        others: number of other processes on a GPU.
        resolve: checks that a device exists.

    Raises:
        UsageError: a name is malformed, a device is given twice, is a CPU, or differs from the
            first one.
        UnsupportedError: a device does not exist.
    """
    if request == ALL:
        return _all(resolve(device or workload_device), count, facts, others)
    if device not in (None, "auto"):
        raise UsageError(f"device {device} and devices {_shown(request)}: pass one of them")
    names = request.split(",") if isinstance(request, str) else list(request)
    names = [_indexed(name) for name in names]
    if not names:
        raise UsageError("devices is empty: name devices such as cuda:0,cuda:1, or all")
    for name in names:
        resolve(name)
        if names.count(name) > 1:
            raise UsageError(f"device {name} is given twice: name each device once")
    first = facts(names[0])
    for name in names[1:]:
        if (difference := _difference(first, facts(name))) is not None:
            raise UsageError(
                f"devices {names[0]} and {name} differ in {difference}: a search needs devices of "
                "one kind"
            )
    busy = {name: _busy(name, others) for name in names}
    notes = [
        f"{name} is busy ({why}): timings may be disturbed" for name, why in busy.items() if why
    ]
    return Devices(tuple(names), {}, tuple(notes))


def devices_of_ranks(
    own: str,
    gpus: Collection[str],
    *,
    count: Callable[[], int] = torch.cuda.device_count,
    facts: Callable[[str], DeviceFacts] = load_facts,
    uuid: Callable[[str], str] = uuid_of,
) -> Devices:
    """This process's GPU, and the visible GPUs of ranks that wait for this process's search.

    GPUs of another machine, of another kind, or hidden by `CUDA_VISIBLE_DEVICES` are left out. The
    processes of other ranks keep memory on their GPUs, and are idle during the search.

    Args:
        own: the GPU of this process.
        gpus: UUIDs of the GPUs of all ranks.
        count: number of visible GPUs.
        facts: facts about a device.
        uuid: UUID of a device.
    """
    own = _indexed(own)
    kind = facts(own)
    seen = (name for name in (f"cuda:{index}" for index in range(count())) if name != own)
    shared = [name for name in seen if uuid(name) in gpus and not _difference(kind, facts(name))]
    return Devices((own, *shared), {}, ())


def _all(
    start: str,
    count: Callable[[], int],
    facts: Callable[[str], DeviceFacts],
    others: Callable[[int], int | None],
) -> Devices:
    start = _indexed(start)
    rest = [name for name in (f"cuda:{index}" for index in range(count())) if name != start]
    kind, left_out, notes = facts(start), dict[str, str](), list[str]()
    for name in rest:
        if (difference := _difference(kind, facts(name))) is not None:
            left_out[name] = f"differs from {start} in {difference}"
    idle: list[str] = []
    for name in (name for name in [start, *rest] if name not in left_out):
        if (why := _busy(name, others)) is None:
            idle.append(name)
        else:
            left_out[name] = f"busy: {why}"
            notes.append(f"{name} is busy ({why}): left out")
    if not idle:
        del left_out[start]
        return Devices((start,), left_out, (f"all devices are busy: using {start} alone",))
    return Devices(tuple(idle), left_out, tuple(notes))


def _indexed(name: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"devices takes names such as cuda:0, got {name!r:.60}")
    kind, index = parse_device(name.strip())
    if kind == "cpu":
        raise UsageError("a search on several devices needs GPUs: use device cpu alone on a CPU")
    return f"{kind}:{index}"


def _difference(one: DeviceFacts, other: DeviceFacts) -> str | None:
    """The first property in which two devices differ, with both values; None if they are equal."""
    for field, label in (
        ("name", "name"),
        ("compute_capability", "compute capability"),
        ("mig_profile", "MIG profile"),
    ):
        mine, yours = getattr(one, field), getattr(other, field)
        if mine != yours:
            return f"{label} ({mine} and {yours})"
    mine, yours = one.memory_bytes or 0, other.memory_bytes or 0
    if abs(mine - yours) > _SAME_MEMORY * max(mine, yours):
        return f"memory ({size(mine)} and {size(yours)})"
    return None


def _busy(name: str, others: Callable[[int], int | None]) -> str | None:
    number = others(parse_device(name)[1])
    return f"{number} other process{'es' if number > 1 else ''}" if number else None


def _shown(request: str | Sequence[str]) -> str:
    return request if isinstance(request, str) else ",".join(map(str, request))
