from __future__ import annotations

import os
import stat
import sysconfig
from importlib import metadata

import pynvml
import pytest
import torch

from steadytorch.device import probes
from steadytorch.device.probes import observability


def _find(name, **kwargs):
    return next(found for found in observability("cuda", **kwargs) if found.name == name)


@pytest.fixture
def root(tmp_path):
    """A fake root file system with everything observable and no quota."""
    files = {
        "proc/stat": "cpu 100 0 50 800 10 0 0 40 0 0\n",
        "proc/sys/kernel/perf_event_paranoid": "2\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/bus/event_source/devices/cpu/type": "4\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty PATH to which a test adds programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(probes.sys, "platform", "linux")

    def put(name):
        program = folder / name
        program.write_text("#!/bin/sh\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return put


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_this_machine_is_probed_without_an_exception(device):
    found = observability(device)
    assert len({observation.name for observation in found}) == len(found)
    assert all(observation.detail for observation in found)


def test_what_fails_comes_with_a_remedy_and_what_works_without(tmp_path, no_library):
    for observation in observability("cuda", library=no_library, root=tmp_path):
        assert observation.ok is (observation.remedy is None)


def test_a_cpu_is_asked_for_engines_and_a_gpu_for_its_driver():
    on_cpu, on_gpu = ({found.name for found in observability(each)} for each in ("cpu", "cuda"))
    assert on_cpu - on_gpu == {"OpenVINO", "ONNX Runtime"}
    assert on_gpu - on_cpu == {"NVML", "GPU process list", "Triton", "cuDNN frontend"}


def test_nvml_that_answers_is_described(fake_nvml):
    assert _find("NVML", library=fake_nvml()).detail == "driver 580.159.04, 1 GPU"


def test_missing_nvml_is_explained(no_library):
    found = _find("NVML", library=no_library)
    assert not found.ok
    assert "libnvidia-ml" in found.detail


def test_a_refused_process_list_is_told_from_missing_nvml(fake_nvml):
    library = fake_nvml(
        refused={"nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}
    )
    assert _find("NVML", library=library).ok
    found = _find("GPU process list", library=library)
    assert (found.ok, found.detail) == (False, "no permission to read it from NVML")


def test_hardware_counters_are_found(root):
    assert _find("hardware counters", root=root).ok


def test_a_virtual_machine_without_counters_is_told(root):
    (root / "sys/bus/event_source/devices/cpu/type").unlink()
    (root / "sys/bus/event_source/devices/cpu").rmdir()
    assert "virtual machines" in _find("hardware counters", root=root).detail


def test_a_paranoid_kernel_refuses_counters_to_ordinary_users(root, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (root / "proc/sys/kernel/perf_event_paranoid").write_text("4\n")
    found = _find("hardware counters", root=root)
    assert (found.ok, "perf_event_paranoid is 4" in found.detail) == (False, True)


def test_stolen_time_is_given_as_a_share(root):
    assert _find("CPU steal", root=root).detail == "4.00% of CPU time stolen since boot"


@pytest.mark.parametrize("line", ["cpu 0 0 0 0 0 0 0 0 0 0\n", "cpu 1 2 3 4\n", "", "intr 5\n"])
def test_a_kernel_that_does_not_count_steal_is_told(root, line):
    (root / "proc/stat").write_text(line)
    assert not _find("CPU steal", root=root).ok


def test_context_switches_of_a_live_process_are_counted():
    assert _find("context switches").ok


def test_a_quota_is_reported_with_how_often_it_struck(root):
    (root / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    (root / "sys/fs/cgroup/cpu.stat").write_text("nr_throttled 12\n")
    found = _find("CPU quota", root=root)
    assert found.ok
    assert "1.5 cores, throttled 12 times" in found.detail


def test_no_quota_is_said_in_two_words(root):
    assert _find("CPU quota", root=root).detail == "none set"


def test_the_compiler_pytorch_looks_for_is_found(path):
    path("g++")
    assert _find("C++ compiler").detail == "g++"


def test_cxx_names_the_compiler(path, monkeypatch):
    path("my-compiler")
    monkeypatch.setenv("CXX", "my-compiler")
    assert _find("C++ compiler").detail == "my-compiler (from CXX)"


def test_a_cxx_that_is_not_there_is_told(path, monkeypatch):
    path("g++")
    monkeypatch.setenv("CXX", "gone")
    assert "CXX='gone'" in _find("C++ compiler").detail


def test_clang_alone_is_not_found_by_pytorch(path):
    path("clang++")
    found = _find("C++ compiler")
    assert (found.ok, "looks for g++" in found.detail) == (False, True)


def test_no_compiler_at_all_is_told(path):
    assert not _find("C++ compiler").ok


def test_missing_python_headers_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h is missing" in _find("Python headers").detail


def test_packages_are_told_with_their_version(monkeypatch):
    monkeypatch.setattr(probes, "find_spec", lambda name: object())
    versions = {"triton": "3.6.0", "nvidia-cudnn-frontend": "1.26.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    assert _find("Triton").detail == "version 3.6.0"
    assert _find("cuDNN frontend").detail == "version 1.26.0"


@pytest.mark.parametrize("version", ["1.15.0", "1.260.0", "1.27.0", "unknown"])
def test_a_frontend_of_another_version_is_not_usable(monkeypatch, version):
    monkeypatch.setattr(probes, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda package: version)
    found = _find("cuDNN frontend")
    expected = f"version {version} is not supported; 1.26 is required"
    assert (found.ok, found.detail) == (False, expected)
    assert found.remedy is not None
    assert found.remedy.startswith("pip install 'steadytorch[cudnn]'")


def test_missing_packages_are_told(monkeypatch):
    monkeypatch.setattr(probes, "find_spec", lambda name: None)
    assert _find("Triton").detail == _find("cuDNN frontend").detail == "not installed"


def test_a_module_of_the_same_name_is_not_mistaken_for_the_package(monkeypatch):
    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(probes, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", unknown)
    found = _find("cuDNN frontend")
    assert (found.ok, "not from nvidia-cudnn-frontend" in found.detail) == (False, True)


@pytest.mark.parametrize(
    ("version", "device", "corrupts"),
    [
        ("2.13.0+cu130", "cuda:1", True),
        ("2.13.2", "cuda", True),
        ("2.13.0a0+gitabc", "cuda", True),
        ("2.13.0+cpu", "cpu", False),
        ("2.12.1+cu130", "cuda", False),
        ("2.130.0", "cuda", False),
        ("2", "cuda", False),
        (None, "cuda", False),
    ],
)
def test_versions_that_corrupt_dropout_are_known(version, device, corrupts):
    assert probes.corrupts_dropout(version, device) is corrupts


@pytest.mark.parametrize(("version", "ok"), [("2.13.0+cu130", False), ("2.12.1+cu130", True)])
def test_dropout_in_compiled_code_is_warned_of(monkeypatch, version, ok):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = _find("dropout in compiled code")
    assert found.ok is ok
    assert version in found.detail
    assert "198333" in found.detail


def test_dropout_without_cuda_is_not_affected(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _find("dropout in compiled code").ok
