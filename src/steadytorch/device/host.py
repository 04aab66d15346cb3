"""Facts about the processor and its limits, from /proc, /sys and cgroups.

Functions raise `NotObservable` if the source of a fact is missing. The argument `root` replaces the
root of the file system, so that tests can read recorded files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from steadytorch.device.observe import NotObservable

ROOT = Path("/")


def read_text(path: Path) -> str:
    """Read a small system file.

    Raises:
        NotObservable: The file is missing or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotObservable(f"{path} cannot be read ({error.strerror})") from None


def cpu_model(root: Path = ROOT) -> str:
    """Model name of the processor, from /proc/cpuinfo."""
    found = re.search(r"^model name\s*:\s*(\S.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    if found is None:
        raise NotObservable("/proc/cpuinfo does not name the processor model")
    return found.group(1).strip()


def saturates_int8(root: Path = ROOT) -> bool:
    """Whether sums of two int8 products saturate at 16 bits, as on x86 without VNNI.

    Source: "Choosing parameters for CPU inference" in `onnxruntime.quantization.quantize_static`.
    """
    flags = re.search(r"^flags\s*:(.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    return flags is not None and "vnni" not in flags[1]


def allowed_cpus() -> frozenset[int]:
    """Indices of the logical CPUs in the affinity mask of this process."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU quota of this process in cores, e.g. 1.5; None if there is no quota.

    Supports cgroup v2 and v1. The tightest limit of the process's cgroup and its ancestors applies.
    """
    groups = list(_cpu_groups(root))
    if not groups:
        raise NotObservable("cannot read a cgroup of this process below /sys/fs/cgroup")
    quotas = [quota for group in groups if (quota := _group_quota(group)) is not None]
    return min(quotas, default=None)


def throttled_periods(root: Path = ROOT) -> int:
    """Number of periods in which a CPU quota throttled this process (nr_throttled).

    Returns the highest count of the process's cgroup and its ancestors.
    """
    counts = []
    for group in _cpu_groups(root):
        stat = group / "cpu.stat"
        if stat.is_file():
            found = re.search(r"^nr_throttled (\d+)$", read_text(stat), re.MULTILINE)
            counts += [int(found.group(1))] if found else []
    if not counts:
        raise NotObservable("the cgroups of this process have no cpu.stat with nr_throttled")
    return max(counts)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Existing cgroup directories that can limit this process's CPU use, innermost first."""
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (controllers, "cpu") if controllers else ("unified", "")
        mount = next((base / name for name in mounts if (base / name).is_dir()), None)
        if mount is None:
            continue
        # In a container, the path may name a host directory that is not mounted here. The
        # ancestors that exist are the ones that apply.
        relative = Path(path.lstrip("/"))
        for ancestor in (relative, *relative.parents):
            if ".." not in ancestor.parts and (mount / ancestor).is_dir():
                yield mount / ancestor


def _group_quota(group: Path) -> float | None:
    """CPU quota of one cgroup in cores; None if the cgroup has no quota."""
    if (group / "cpu.max").is_file():
        limit, period = read_text(group / "cpu.max").split()
        return None if limit == "max" else int(limit) / int(period)
    if (group / "cpu.cfs_quota_us").is_file():
        limit = int(read_text(group / "cpu.cfs_quota_us"))
        period = int(read_text(group / "cpu.cfs_period_us"))
        return limit / period if limit > 0 else None
    return None


def usable_logical_cores(root: Path = ROOT) -> int:
    """Number of logical cores this process can use: affinity, capped by its quota, rounded down."""
    allowed = len(allowed_cpus())
    try:
        quota = cpu_quota(root)
    except NotObservable:
        quota = None
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def usable_physical_cores(root: Path = ROOT) -> int:
    """Number of physical cores this process can use; hyper-threads of one core count once."""
    cores = set()
    for cpu in allowed_cpus():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            package = read_text(topology / "physical_package_id").strip()
            cores.add((package, read_text(topology / "core_id").strip()))
        except NotObservable:
            cores.clear()
            break
    count = len(cores) or psutil.cpu_count(logical=False)
    if not count:
        raise NotObservable("neither /sys nor psutil reports physical cores")
    return min(count, usable_logical_cores(root))


def last_level_cache_bytes(root: Path = ROOT) -> int:
    """Bytes of last-level cache that the allowed CPUs can use; shared caches count once."""
    caches: dict[int, dict[str, int]] = {}
    for cpu in allowed_cpus():
        for cache in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level = int(read_text(cache / "level"))
            sharers = read_text(cache / "shared_cpu_list").strip()
            size = read_text(cache / "size").strip()
            caches.setdefault(level, {})[sharers] = int(size.removesuffix("K")) * 1024
    if not caches:
        raise NotObservable("/sys/devices/system/cpu lists no caches")
    return sum(caches[max(caches)].values())


def nvidia_driver_version(root: Path = ROOT) -> str:
    """Version of the loaded NVIDIA kernel driver, from /proc/driver/nvidia/version."""
    text = read_text(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    if found is None:
        raise NotObservable("/proc/driver/nvidia/version contains no version number")
    return found.group(1)
