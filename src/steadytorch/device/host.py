"""What /proc, /sys and cgroups say about the processor this process may use.

Each function raises `NotObservable` where its source is missing. `root` stands for the root of the
file system, so that tests read recorded trees.
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
    """Text of a small system file.

    Raises:
        NotObservable: The file is missing or may not be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotObservable(f"{path} cannot be read ({error.strerror})") from None


def cpu_model(root: Path = ROOT) -> str:
    """Model name of the processor, from /proc/cpuinfo."""
    found = re.search(r"^model name\s*:\s*(\S.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    if found is None:
        raise NotObservable("/proc/cpuinfo names no model")
    return found.group(1).strip()


def allowed_cpus() -> frozenset[int]:
    """Numbers of the logical CPUs that the affinity of this process allows."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU quota of this process in cores (1.5 is three halves of a core); None: no quota.

    The tightest limit among the group and its ancestors counts, for cgroup v2 and v1.
    """
    groups = list(_cpu_groups(root))
    if not groups:
        raise NotObservable("no cgroup of this process can be read below /sys/fs/cgroup")
    quotas = [quota for group in groups if (quota := _group_quota(group)) is not None]
    return min(quotas, default=None)


def throttled_periods(root: Path = ROOT) -> int:
    """How often a CPU quota has stopped this process so far (nr_throttled).

    Of its group and the ancestors, the one that was stopped most often counts.
    """
    counts = []
    for group in _cpu_groups(root):
        stat = group / "cpu.stat"
        if stat.is_file():
            found = re.search(r"^nr_throttled (\d+)$", read_text(stat), re.MULTILINE)
            counts += [int(found.group(1))] if found else []
    if not counts:
        raise NotObservable("no cpu.stat with nr_throttled in this process's cgroups")
    return max(counts)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Existing directories of this process's cgroups that can limit the CPU, innermost first."""
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (controllers, "cpu") if controllers else ("unified", "")
        mount = next((base / name for name in mounts if (base / name).is_dir()), None)
        if mount is None:
            continue
        # Inside a container the path may name a directory of the host that is not mounted here;
        # whichever ancestors exist are the ones that apply.
        relative = Path(path.lstrip("/"))
        for ancestor in (relative, *relative.parents):
            if ".." not in ancestor.parts and (mount / ancestor).is_dir():
                yield mount / ancestor


def _group_quota(group: Path) -> float | None:
    """Quota of one cgroup in cores, None where it sets none."""
    if (group / "cpu.max").is_file():
        limit, period = read_text(group / "cpu.max").split()
        return None if limit == "max" else int(limit) / int(period)
    if (group / "cpu.cfs_quota_us").is_file():
        limit = int(read_text(group / "cpu.cfs_quota_us"))
        period = int(read_text(group / "cpu.cfs_period_us"))
        return limit / period if limit > 0 else None
    return None


def usable_logical_cores(root: Path = ROOT) -> int:
    """Logical cores this process can keep busy: its affinity, cut to whole cores of its quota."""
    allowed = len(allowed_cpus())
    try:
        quota = cpu_quota(root)
    except NotObservable:
        quota = None
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def usable_physical_cores(root: Path = ROOT) -> int:
    """Physical cores behind `usable_logical_cores`: hyper-threads of one core count once."""
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
        raise NotObservable("neither /sys nor psutil tells physical from logical cores")
    return min(count, usable_logical_cores(root))


def last_level_cache_bytes(root: Path = ROOT) -> int:
    """Bytes of last-level cache that the allowed CPUs reach, each shared cache counted once."""
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
        raise NotObservable("/proc/driver/nvidia/version holds no version number")
    return found.group(1)
