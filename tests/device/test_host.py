from __future__ import annotations

import pytest

from steadytorch.device import host
from steadytorch.device.observe import NotObservable


@pytest.fixture
def tree(tmp_path):
    """Writes files below a fake root of the file system and returns it."""

    def write(**files: str):
        for path, text in files.items():
            target = tmp_path / path.replace("|", "/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return tmp_path

    return write


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(host, "allowed_cpus", lambda: frozenset(range(4)))


def test_cpu_model_is_read_from_cpuinfo(tree):
    root = tree(**{"proc|cpuinfo": "processor : 0\nmodel name\t: AMD EPYC 9654\nflags : fpu\n"})
    assert host.cpu_model(root) == "AMD EPYC 9654"


def test_cpu_model_says_when_cpuinfo_names_none(tree):
    with pytest.raises(NotObservable, match="does not name the processor model"):
        host.cpu_model(tree(**{"proc|cpuinfo": "CPU implementer : 0x41\n"}))


@pytest.mark.parametrize(
    ("flags", "saturates"),
    [
        ("flags\t\t: fpu avx2\n", True),
        ("flags\t\t: avx2 avx512_vnni\n", False),
        ("flags\t\t: avx2 avx_vnni\n", False),
        ("Features\t: asimddp i8mm\n", False),
    ],
    ids=["avx2", "avx512", "avx", "arm"],
)
def test_int8_saturates_on_x86_without_vnni(tree, flags, saturates):
    assert host.saturates_int8(tree(**{"proc|cpuinfo": flags})) is saturates


def test_a_missing_proc_is_a_reason(tmp_path):
    with pytest.raises(NotObservable, match="cannot be read"):
        host.cpu_model(tmp_path)


def test_quota_of_cgroup_v2_is_in_cores(tree):
    root = tree(**{"proc|self|cgroup": "0::/job\n", "sys|fs|cgroup|job|cpu.max": "150000 100000\n"})
    assert host.cpu_quota(root) == 1.5


def test_the_tightest_ancestor_sets_the_quota(tree):
    root = tree(
        **{
            "proc|self|cgroup": "0::/pod/job\n",
            "sys|fs|cgroup|pod|cpu.max": "200000 100000\n",
            "sys|fs|cgroup|pod|job|cpu.max": "max 100000\n",
        }
    )
    assert host.cpu_quota(root) == 2.0


def test_quota_of_cgroup_v1(tree):
    root = tree(
        **{
            "proc|self|cgroup": "4:memory:/\n3:cpu,cpuacct:/job\n",
            "sys|fs|cgroup|cpu,cpuacct|job|cpu.cfs_quota_us": "50000\n",
            "sys|fs|cgroup|cpu,cpuacct|job|cpu.cfs_period_us": "100000\n",
        }
    )
    assert host.cpu_quota(root) == 0.5


def test_no_quota_is_none(tree):
    root = tree(
        **{
            "proc|self|cgroup": "1:cpu:/\n",
            "sys|fs|cgroup|cpu|cpu.cfs_quota_us": "-1\n",
            "sys|fs|cgroup|cpu|cpu.cfs_period_us": "100000\n",
        }
    )
    assert host.cpu_quota(root) is None


def test_a_path_of_the_host_falls_back_to_what_is_mounted(tree):
    root = tree(
        **{"proc|self|cgroup": "0::/host/only/path\n", "sys|fs|cgroup|cpu.max": "300000 100000\n"}
    )
    assert host.cpu_quota(root) == 3.0


def test_without_cgroups_the_quota_is_not_observable(tree):
    with pytest.raises(NotObservable, match="cannot read a cgroup"):
        host.cpu_quota(tree(**{"proc|self|cgroup": ""}))


def test_throttled_periods_are_counted(tree):
    root = tree(
        **{
            "proc|self|cgroup": "0::/job\n",
            "sys|fs|cgroup|job|cpu.stat": "nr_periods 90\nnr_throttled 7\nthrottled_usec 3\n",
        }
    )
    assert host.throttled_periods(root) == 7


def test_a_quota_of_an_ancestor_throttles_too(tree):
    root = tree(
        **{
            "proc|self|cgroup": "0::/limited.slice/run.scope\n",
            "sys|fs|cgroup|limited.slice|cpu.stat": "nr_periods 90\nnr_throttled 77\n",
            "sys|fs|cgroup|limited.slice|run.scope|cpu.stat": "nr_periods 0\nnr_throttled 0\n",
        }
    )
    assert host.throttled_periods(root) == 77


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("50000", 1), ("900000", 4)])
def test_usable_cores_are_affinity_cut_to_whole_cores_of_the_quota(tree, four_cpus, quota, cores):
    root = tree(
        **{"proc|self|cgroup": "0::/\n", "sys|fs|cgroup|cpu.max": f"{quota} 100000\n"},
    )
    assert host.usable_logical_cores(root) == cores


def test_hyper_threads_of_a_core_count_once(tree, four_cpus):
    files = {}
    for cpu in range(4):
        topology = f"sys|devices|system|cpu|cpu{cpu}|topology|"
        files[topology + "physical_package_id"] = "0\n"
        files[topology + "core_id"] = f"{cpu % 2}\n"
    assert host.usable_physical_cores(tree(**files)) == 2


def test_each_shared_cache_counts_once_at_the_last_level(tree, four_cpus):
    files = {}
    for cpu in range(4):
        for index, level, size, sharers in (
            ("index2", 2, "1024K", str(cpu)),
            ("index3", 3, "32768K", "0-1" if cpu < 2 else "2-3"),
        ):
            cache = f"sys|devices|system|cpu|cpu{cpu}|cache|{index}|"
            files |= {cache + "level": f"{level}\n", cache + "size": f"{size}\n"}
            files[cache + "shared_cpu_list"] = f"{sharers}\n"
    assert host.last_level_cache_bytes(tree(**files)) == 2 * 32768 * 1024


def test_no_cache_in_sys_is_a_reason(tmp_path):
    with pytest.raises(NotObservable, match="lists no caches"):
        host.last_level_cache_bytes(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (b)",
    ],
)
def test_driver_version_of_both_kernel_modules(tree, line):
    root = tree(**{"proc|driver|nvidia|version": line + "\nGCC version:  gcc version 13.3.0\n"})
    assert host.nvidia_driver_version(root) == "580.95.05"


def test_this_machine_has_at_least_one_core_and_no_more_physical_than_logical():
    logical = host.usable_logical_cores()
    assert 1 <= host.usable_physical_cores() <= logical
