"""Probes of `steady doctor`: which facts this machine exposes, and remedies for missing ones."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steadytorch.device import host
from steadytorch.device.nvml import open_nvml
from steadytorch.device.observe import NotObservable, Readings
from steadytorch.results.machine import Observation

# Above this perf_event_paranoid refuses hardware counters to unprivileged processes (manual page
# of perf_event_open).
_PARANOID_LIMIT = 2
CUDNN_EXTRA = "steadytorch[cudnn]"
CUDNN_FRONTEND = "1.26"
"""The only supported version: 1.27 rewrote the graph API, 1.29 needs further packages."""
CORRUPTS_DROPOUT = "2.13"
"""The version whose Inductor corrupts dropout masks on CUDA (pytorch issue 198333)."""


def observability(device: str, *, library: Any = None, root: Path = host.ROOT) -> list[Observation]:
    """Run the probes for a device; needs no privileges, starts no program and never raises.

    Args:
        device: "cpu" or "cuda", with or without an index.
        library: Replacement for nvidia-ml-py; None imports it.
        root: Root of the file system to read.
    """
    probes: dict[str, tuple[Callable[[], str], str]] = {
        **(_of_gpus(library) if device.startswith("cuda") else _of_engines()),
        "hardware counters": (
            lambda: _hardware_counters(root),
            "nothing; diagnoses do not need cycle and cache counts",
        ),
        "CPU steal": (
            lambda: _cpu_steal(root),
            "compare within one run only; load from other virtual machines cannot be detected",
        ),
        "context switches": (
            _context_switches,
            "pin the process to its cores; preemption cannot be detected",
        ),
        "CPU quota": (
            lambda: _cpu_quota(root),
            "run without a CPU quota; a quota stalls the process at the end of each period",
        ),
        "C++ compiler": (
            _cxx_compiler,
            "install g++, or set CXX to a compiler; torch.compile on the CPU needs one",
        ),
        "Python headers": (
            _python_headers,
            "install Python's development package; torch.compile needs Python.h",
        ),
        "writes to weights": (
            _weight_writes,
            "pass verify_every=1000 to optimize or apply to verify every 1,000th call",
        ),
        "dropout in compiled code": (
            _dropout,
            "leave training with dropout uncompiled, or use steady tune, which verifies masks",
        ),
    }
    return [_observe(name, probe, remedy) for name, (probe, remedy) in probes.items()]


def _of_gpus(library: Any) -> dict[str, tuple[Callable[[], str], str]]:
    return {
        "NVML": (
            lambda: _nvml(library),
            "install the NVIDIA driver; in a container allow its 'utility' capability",
        ),
        "GPU process list": (
            lambda: _gpu_processes(library),
            "use a GPU that you do not share; other processes on it cannot be detected",
        ),
        "Triton": (
            lambda: f"version {_installed('triton', ('triton', 'pytorch-triton'))}",
            "pip install triton; torch.compile on a GPU and fused kernels need it",
        ),
        "cuDNN frontend": (
            _cudnn_frontend,
            f"pip install '{CUDNN_EXTRA}'; choosing convolution engines needs it",
        ),
    }


def _of_engines() -> dict[str, tuple[Callable[[], str], str]]:
    return {
        name: (
            lambda module=module: f"version {_installed(module, (module,))}",
            f"pip install 'steadytorch[{module}]'; plans that run on {name} need it",
        )
        for module, name in (("openvino", "OpenVINO"), ("onnxruntime", "ONNX Runtime"))
    }


def _observe(name: str, probe: Callable[[], str], remedy: str) -> Observation:
    readings = Readings()
    detail = readings.read(name, probe)
    if detail is None:
        return Observation(name, False, readings.unknown[name], remedy)
    return Observation(name, True, detail)


def _weight_writes() -> str:
    raise NotObservable(
        "writes that bypass PyTorch's version counter and change few elements of a large tensor "
        "may be missed"
    )


def corrupts_dropout(version: str | None, device: str) -> bool:
    """Whether code compiled by a PyTorch version may give groups of four channels one dropout mask.

    Args:
        version: of PyTorch, such as "2.13.0+cu130"; None for unknown.
        device: "cpu" or "cuda", with or without an index.
    """
    release = (version or "").partition("+")[0].split(".")
    return release[:2] == CORRUPTS_DROPOUT.split(".") and device.startswith("cuda")


def _dropout() -> str:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if corrupts_dropout(torch.__version__, device):
        raise NotObservable(
            f"torch.compile of PyTorch {torch.__version__} can give groups of four channels one "
            "dropout mask on CUDA (pytorch issue 198333)"
        )
    return f"not affected by pytorch issue 198333 (PyTorch {torch.__version__}, {device})"


def _nvml(library: Any) -> str:
    with open_nvml(library) as nvml:
        driver = nvml.call("nvmlSystemGetDriverVersion")
        count = nvml.call("nvmlDeviceGetCount")
    return f"driver {driver}, {count} GPU{'' if count == 1 else 's'}"


def _gpu_processes(library: Any) -> str:
    with open_nvml(library) as nvml:
        # The driver grants this permission for all GPUs at once, so the first one suffices.
        handle = nvml.call("nvmlDeviceGetHandleByIndex", 0)
        listed = nvml.call("nvmlDeviceGetComputeRunningProcesses", handle)
    return f"permitted, {len(listed)} listed on the first GPU"


def _hardware_counters(root: Path) -> str:
    units = root / "sys/bus/event_source/devices"
    if not any(units.glob("cpu*")) and not any(units.glob("armv*")):
        raise NotObservable("the kernel exposes no CPU counters, as in most virtual machines")
    level = int(host.read_text(root / "proc/sys/kernel/perf_event_paranoid"))
    if level > _PARANOID_LIMIT and os.geteuid() != 0:
        raise NotObservable(f"kernel.perf_event_paranoid is {level}: access needs privileges")
    return f"permitted for your own processes (kernel.perf_event_paranoid is {level})"


def _cpu_steal(root: Path) -> str:
    # user nice system idle iowait irq softirq steal ... (proc manual page)
    first = host.read_text(root / "proc/stat").partition("\n")[0].split()
    ticks = [int(field) for field in first[1:9]]
    if first[:1] != ["cpu"] or len(ticks) < 8 or not sum(ticks):
        raise NotObservable("/proc/stat does not count stolen time")
    return f"{ticks[7] / sum(ticks):.2%} of CPU time stolen since boot"


def _context_switches() -> str:
    try:
        import resource
    except ImportError:
        raise NotObservable("this operating system does not count them per process") from None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # By now this process has waited for a file at least once, so a true count is not zero.
    if usage.ru_nvcsw + usage.ru_nivcsw == 0:
        raise NotObservable("the kernel's counters stay at zero, as in some sandboxes")
    return "counted, voluntary and involuntary"


def _cpu_quota(root: Path) -> str:
    quota = host.cpu_quota(root)
    if quota is None:
        return "none set"
    throttled = Readings().read("throttled", lambda: host.throttled_periods(root))
    seen = "" if throttled is None else f", throttled {throttled} times so far"
    return f"{quota:g} cores{seen}; running more threads than that causes stalls"


def _cxx_compiler() -> str:
    chosen = os.environ.get("CXX")
    if chosen:
        if not shutil.which(chosen):
            raise NotObservable(f"CXX={chosen!r} is not an executable on PATH")
        return f"{chosen} (from CXX)"
    # Without CXX, PyTorch looks for this one name only.
    wanted = "clang++" if sys.platform == "darwin" else "g++"
    found = next((name for name in (wanted, "clang++", "c++") if shutil.which(name)), None)
    if found is None:
        raise NotObservable(
            "no C++ compiler found: CXX is not set, and g++ and clang++ are missing"
        )
    if found != wanted:
        raise NotObservable(f"found {found}, but PyTorch looks for {wanted} unless CXX is set")
    return found


def _python_headers() -> str:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise NotObservable(f"{header} is missing")
    return "found"


def _cudnn_frontend() -> str:
    found = _installed("cudnn", ("nvidia-cudnn-frontend",))
    if not found.startswith(CUDNN_FRONTEND + "."):
        raise NotObservable(f"version {found} is not supported; {CUDNN_FRONTEND} is required")
    return f"version {found}"


def _installed(module: str, packages: tuple[str, ...]) -> str:
    """Version of the first installed package of `packages` if `module` can be imported."""
    if find_spec(module) is None:
        raise NotObservable("not installed")
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    raise NotObservable(f"module {module!r} exists, but not from {packages[0]}")
