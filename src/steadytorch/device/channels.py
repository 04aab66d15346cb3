"""Telemetry channels of the recorder: the operating system, the GPU and PyTorch's counters.

A channel raises if it cannot be read; the recorder then drops it and keeps the reason.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from steadytorch.device import host
from steadytorch.device.facts import gpu_properties, parse_device
from steadytorch.device.nvml import NvmlGpu, open_gpu
from steadytorch.device.observe import NOT_ON_CPU, NotObservable, Readings
from steadytorch.device.recording import READ_EVERY, mask_of
from steadytorch.device.telemetry import count_others, holds_context, own_pids

GPU_FIELDS = ("sm_clock_mhz", "power_milliwatts", "clock_event_mask", "other_gpu_processes")
ALLOCATOR_FIELDS = ("allocator_retries", "allocator_device_calls")

_UNTIMED = "the kernel does not time threads (schedstats are off)"
_ENOUGH_READINGS = 10  # over ten ticks, even one core's counters at 100 Hz must advance


class Channel(Protocol):
    """Telemetry source that fills one or more columns of a recording."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns that `read` fills, in order."""
        ...

    def read(self) -> Sequence[int]:
        """Current values."""
        ...

    def doubts(self) -> dict[str, str]:
        """Report fields with invalid values, with the reason; called after the last tick."""
        ...


class ProcessUsage:
    """Context switches and page faults of this process, excluding the recorder's thread."""

    fields = ("voluntary_switches", "involuntary_switches", "minor_faults", "major_faults")

    def __init__(self) -> None:
        try:
            import resource
        except ImportError:
            raise NotObservable("this operating system does not count them per process") from None
        if not hasattr(resource, "RUSAGE_THREAD"):
            raise NotObservable("this operating system does not count them per thread")
        self._resource: Any = resource

    def read(self) -> Sequence[int]:
        """Read the counts of switches and faults; each getrusage call takes under 1 us."""
        whole = self._resource.getrusage(self._resource.RUSAGE_SELF)
        own = self._resource.getrusage(self._resource.RUSAGE_THREAD)
        return (
            whole.ru_nvcsw - own.ru_nvcsw,
            whole.ru_nivcsw - own.ru_nivcsw,
            whole.ru_minflt - own.ru_minflt,
            whole.ru_majflt - own.ru_majflt,
        )

    def doubts(self) -> dict[str, str]:
        """Report counters that stay at zero, as in some sandboxes."""
        # The recorder's thread waits between ticks, so true counts are not zero.
        whole = self._resource.getrusage(self._resource.RUSAGE_SELF)
        reason = "the kernel's counters stay at zero, as in some sandboxes"
        silent = self.fields[:2] if whole.ru_nvcsw + whole.ru_nivcsw == 0 else ()
        silent += self.fields[2:] if whole.ru_minflt + whole.ru_majflt == 0 else ()
        return dict.fromkeys(silent, reason)


class RunQueue:
    """Exact time that one thread waited for a core, as counted by the kernel's scheduler.

    Args:
        thread_id: kernel ID of the thread.
        stack: closes the file.
        root: root of the file system to read.
    """

    fields = ("wait_ns",)

    def __init__(self, thread_id: int, stack: ExitStack, root: Path = host.ROOT) -> None:
        path = root / f"proc/self/task/{thread_id}/schedstat"
        self._file = _open(path, stack)
        self._run_ns = 0

    def read(self) -> Sequence[int]:
        """Waiting time in ns."""
        self._run_ns, wait_ns = map(int, os.pread(self._file, 80, 0).split()[:2])
        return (wait_ns,)

    def doubts(self) -> dict[str, str]:
        """Report the waiting time as invalid if the run time is 0: the kernel times neither."""
        return {} if self._run_ns else {"wait_ns": _UNTIMED}


class PoolQueue:
    """Longest time that a native worker thread of this process waited for a core.

    Most native worker threads belong to PyTorch's OpenMP pool. OpenMP threads synchronise at the
    end of each parallel operator, so one thread without a core delays all. Python threads and the
    measured thread are excluded. Waiting time counts from a thread's first reading.

    Args:
        thread_id: kernel ID of the measured thread.
        stack: closes the files.
        root: root of the file system to read.
    """

    fields = ("pool_wait_ns",)
    LOOK_EVERY, MOST_THREADS = 32, 64

    def __init__(self, thread_id: int, stack: ExitStack, root: Path = host.ROOT) -> None:
        self._measured, self._tasks = thread_id, root / "proc/self/task"
        self._files: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._reads = self._run_ns = self._longest = 0
        stack.callback(self._close)
        self._look()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _look(self) -> None:
        """Open the schedstat files of new threads."""
        try:
            found = sorted(map(int, os.listdir(self._tasks)))
        except OSError as error:
            raise NotObservable(f"{self._tasks} cannot be read ({error.strerror})") from None
        known = {self._measured, *(thread.native_id for thread in threading.enumerate())}
        for thread in found:
            if thread in known or thread in self._files or len(self._files) >= self.MOST_THREADS:
                continue
            with suppress(OSError):  # it may just have ended
                self._files[thread] = os.open(self._tasks / f"{thread}/schedstat", os.O_RDONLY)

    def read(self) -> Sequence[int]:
        """Longest waiting time so far in ns; reading it takes 2 us per thread."""
        self._reads += 1
        if self._reads % self.LOOK_EVERY == 0:
            self._look()
        for thread, file in list(self._files.items()):
            try:
                run_ns, wait_ns = map(int, os.pread(file, 80, 0).split()[:2])
            except (OSError, ValueError):  # the thread has ended
                os.close(self._files.pop(thread))
                continue
            self._run_ns += run_ns
            waited = wait_ns - self._first.setdefault(thread, wait_ns)
            self._longest = max(self._longest, waited)
        return (self._longest,)

    def doubts(self) -> dict[str, str]:
        """Report the time as invalid without native threads, or if the kernel has no run times."""
        if not self._first:
            return {"pool_wait_ns": "does not apply: the process has no native threads"}
        return {} if self._run_ns else {"pool_wait_ns": _UNTIMED}


class ResidentMemory:
    """Resident memory of this process, excluding file-backed and shared pages.

    File-backed pages, such as code, can grow without a leak, because the kernel evicts and reloads
    them. Source: "/proc/pid/statm" in proc(5), resident minus shared pages.

    Free heap bytes are held by glibc's malloc but unused by the process (mallinfo2(3), fordblks).
    Reading the free heap bytes takes 0.5 ms for 2,000 free chunks, so it is repeated only after
    resident memory grew by `STEP_BYTES`.

    Args:
        stack: closes the file.
        root: root of the file system to read.
    """

    fields = ("resident_bytes", "heap_free_bytes")
    STEP_BYTES = 8 << 20

    def __init__(self, stack: ExitStack, root: Path = host.ROOT) -> None:
        self._file = _open(root / "proc/self/statm", stack)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._heap = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._heap is not None:
            self._heap.restype = _Heap
        self._free = self._most = 0

    def read(self) -> Sequence[int]:
        """Resident bytes, and free heap bytes as of the last growth of resident memory."""
        whole, shared = map(int, os.pread(self._file, 80, 0).split()[1:3])
        resident = (whole - shared) * self._page
        if self._heap is not None and resident >= self._most + self.STEP_BYTES:
            self._most, self._free = resident, self._heap().fordblks
        return resident, self._free

    def doubts(self) -> dict[str, str]:
        """Report the free heap bytes as invalid without glibc 2.33 or later."""
        reason = "the C library has no mallinfo2"
        return {} if self._heap is not None else {"heap_free_bytes": reason}


class CpuTimes:
    """Stolen CPU time and disk wait (iowait), summed over all cores.

    Args:
        stack: closes the file.
        root: root of the file system to read.
    """

    fields = ("steal_ns", "iowait_ns")

    def __init__(self, stack: ExitStack, root: Path = host.ROOT) -> None:
        self._file = _open(root / "proc/stat", stack)
        self._step_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        self._first = self._last = self._readings = 0

    def read(self) -> Sequence[int]:
        """Stolen CPU time and disk wait (iowait) in ns."""
        line = os.pread(self._file, 256, 0).split(b"\n", 1)[0].split()
        steps = [int(field) for field in line[1:9]]
        if line[:1] != [b"cpu"] or len(steps) < 8 or not sum(steps):
            raise NotObservable("/proc/stat does not count stolen time")
        self._last = sum(steps)
        self._first = self._first or self._last
        self._readings += 1
        return steps[7] * self._step_ns, steps[4] * self._step_ns

    def doubts(self) -> dict[str, str]:
        """Report both counters as invalid if they never advance, as in some sandboxes."""
        if self._last > self._first or self._readings < _ENOUGH_READINGS:
            return {}
        return dict.fromkeys(self.fields, "the kernel's CPU time counters do not advance")


class Compilations:
    """Number of frames that torch.compile began to compile; zero until torch.compile is loaded."""

    fields = ("compilations",)

    def __init__(self) -> None:
        self._last = self._count = 0

    def read(self) -> Sequence[int]:
        """Number of compilations so far; unaffected by resets of PyTorch's counters."""
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        now = int(counters.get("frames", {}).get("total", 0))
        self._count += now - self._last if now >= self._last else now
        self._last = now
        return (self._count,)

    def doubts(self) -> dict[str, str]:
        """Report the count as invalid if torch.compile was never loaded."""
        if "torch._dynamo.utils" in sys.modules:
            return {}
        return {"compilations": "does not apply: torch.compile is not in use"}


class Allocator:
    """Retries and driver calls of PyTorch's CUDA allocator; zero until CUDA is initialised.

    Args:
        index: CUDA index of the device.
    """

    fields = ALLOCATOR_FIELDS

    def __init__(self, index: int) -> None:
        self._index = index
        self._seen = False

    def read(self) -> Sequence[int]:
        """Number of retries, and of segments allocated or freed; does not initialise CUDA."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0, 0
        self._seen = True
        counts = torch.cuda.memory_stats_as_nested_dict(self._index)
        segments = counts.get("segment", {}).get("all", {})
        calls = segments.get("allocated", 0) + segments.get("freed", 0)
        return counts.get("num_alloc_retries", 0), calls

    def doubts(self) -> dict[str, str]:
        """Report both counts as invalid if CUDA was never initialised."""
        reason = "CUDA is not initialised in this process"
        return {} if self._seen else dict.fromkeys(self.fields, reason)


class GpuReading:
    """Channel for one NVML reading of the GPU, such as the SM clock.

    Args:
        field: the column to fill.
        reading: returns the current value.
    """

    def __init__(self, field: str, reading: Callable[[], int]) -> None:
        self.fields = (field,)
        self._reading = reading

    def read(self) -> Sequence[int]:
        """Current value."""
        return (self._reading(),)

    def doubts(self) -> dict[str, str]:
        """Report nothing: NVML raises for values that it cannot supply."""
        return {}


class Neighbours:
    """Number of other processes with a compute context on the GPU.

    Args:
        gpu: the GPU.
        index: its CUDA index.
    """

    fields = ("other_gpu_processes",)

    def __init__(self, gpu: NvmlGpu, index: int) -> None:
        self._gpu, self._index = gpu, index
        self._listed: tuple[Any, ...] = ()
        self._others = 0

    def read(self) -> Sequence[int]:
        """Number of other processes; recounted only if the driver's process list changes."""
        listed = (holds_context(self._index), *self._gpu.compute_pids())
        if listed != self._listed:
            has_context, *pids = listed
            self._others = count_others(pids, own_pids(), has_context=bool(has_context))
            self._listed = listed
        return (self._others,)

    def doubts(self) -> dict[str, str]:
        """Report nothing: `read` raises on an implausible process list."""
        return {}


class _Heap(ctypes.Structure):
    """The `mallinfo2` struct of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def ticks_between(channel: Channel) -> int:
    """Number of ticks from one read of a channel to the next; its values repeat in between."""
    return READ_EVERY.get(channel.fields[0], 1)


def open_channels(
    device: str,
    thread_id: int,
    stack: ExitStack,
    readings: Readings,
    *,
    library: Any = None,
    root: Path = host.ROOT,
) -> list[Channel]:
    """Open every available channel; the reasons for missing channels go to `readings`.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        thread_id: kernel ID of the measured thread.
        stack: closes the opened files and sessions.
        readings: collects the reasons.
        library: replacement for nvidia-ml-py; None imports it.
        root: root of the file system to read.

    Raises:
        UsageError: `device` is malformed.
    """
    kind, index = parse_device(device)
    sources: list[tuple[tuple[str, ...], Callable[[], Channel]]] = [
        (ProcessUsage.fields, ProcessUsage),
        (RunQueue.fields, lambda: RunQueue(thread_id, stack, root)),
        (CpuTimes.fields, lambda: CpuTimes(stack, root)),
        (ResidentMemory.fields, lambda: ResidentMemory(stack, root)),
        (Compilations.fields, Compilations),
    ]
    if kind == "cuda":
        sources.append((Allocator.fields, lambda: Allocator(index)))
        readings.refuse(PoolQueue.fields, "recorded on a CPU only")
    else:
        sources.append((PoolQueue.fields, lambda: PoolQueue(thread_id, stack, root)))
    channels: list[Channel] = []
    for fields, source in sources:
        try:
            channels.append(source())
        except Exception as error:  # as with any reading; see `Readings.read`
            readings.refuse(fields, error)
    if kind == "cuda":
        return channels + _gpu_channels(index, stack, readings, library)
    readings.refuse((*GPU_FIELDS, *ALLOCATOR_FIELDS), NOT_ON_CPU)
    return channels


def _gpu_channels(index: int, stack: ExitStack, readings: Readings, library: Any) -> list[Channel]:
    try:
        if "torch" not in sys.modules:
            raise NotObservable("PyTorch, which identifies the GPU, is not loaded in this process")
        uuid = str(gpu_properties(index).uuid)
        gpu = stack.enter_context(open_gpu(uuid, index, library))
    except Exception as error:
        readings.refuse(GPU_FIELDS, error)
        return []
    return [
        GpuReading("sm_clock_mhz", gpu.sm_clock_mhz),
        GpuReading("power_milliwatts", lambda: round(1000 * gpu.power_watts())),
        GpuReading("clock_event_mask", lambda: mask_of(gpu.clock_event_reasons())),
        Neighbours(gpu, index),
    ]


def _open(path: Path, stack: ExitStack) -> int:
    """Open a file once for all ticks; reopening it at each tick would cost ten times as much."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise NotObservable(f"{path} cannot be read ({error.strerror})") from None
    stack.callback(os.close, file)
    return file
